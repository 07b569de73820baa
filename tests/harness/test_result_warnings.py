"""Warnings of a result that come from comparing its trials."""

from __future__ import annotations

from typing import Any

from backends.types import ServingConfig
from harness.result import batch_size_warnings
from harness.store import Trial
from harness.types import Load


def trial(k: int, batch_size: int, tau: float, half: float = 0.05, **extra: Any) -> Trial:
    config = ServingConfig(backend="vllm", model="m", variant="ngram", k=k, extra=extra)
    spec = {"tau": tau, "tau_ci95": [tau - half, tau + half]}
    load = Load("closed", "t", concurrency=batch_size)
    return Trial(batch_size, "COMPLETE", "spec", config, load, "", "search", (0,), metrics={}, speculation=spec)


def test_a_tau_that_falls_with_the_batch_size_is_a_warning_for_the_worst_configuration() -> None:
    falling = [trial(3, 1, 1.73), trial(3, 8, 1.18), trial(5, 1, 1.48), trial(5, 8, 1.15)]
    (warning,) = batch_size_warnings(falling)
    assert warning.startswith("tau of ngram K=3 falls from 1.73 at batch size 1 to 1.18 at 8")


def test_a_tau_that_does_not_clearly_fall_is_none() -> None:
    assert batch_size_warnings([trial(3, 1, 1.70), trial(3, 8, 1.62)]) == []  # by less than a tenth
    assert batch_size_warnings([trial(3, 1, 1.7, 0.3), trial(3, 8, 1.4, 0.3)]) == []  # within the intervals
    assert batch_size_warnings([trial(3, 1, 1.3), trial(3, 8, 1.6)]) == []  # it rises
    scheduled = {"k_schedule": [[1, 4, 3], [5, 8, 0]]}
    assert batch_size_warnings([trial(3, 1, 1.7, **scheduled), trial(3, 8, 1.0, **scheduled)]) == []
    assert batch_size_warnings([trial(3, 1, 1.7)]) == []
