"""Which trials are held against each other, with ratios that can be checked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_builder import RunSpec, result_of

from reports.compare import baseline_of, candidate_of, pairs_of, speedup_maps, speedups
from reports.figures import Point, pareto_front
from reports.render import heat_class
from reports.rundata import Requests, RunData


def config(variant: str, k: int, quantization: str = "none") -> dict[str, Any]:
    return {"backend": "reference", "model": "m", "variant": variant, "k": k, "weight_quantization": quantization}


def trial(number: int, config: dict[str, Any], batch: int, e2e_s: float | None, role: str = "search") -> dict[str, Any]:
    metrics = None if e2e_s is None else {"e2e_s": {"p50": e2e_s}, "output_tokens_per_s": 1.0}
    state = "FAIL" if metrics is None else "COMPLETE"
    load = {"trace": "t", "mode": "closed", "concurrency": batch, "time_scale": None}
    return {"number": number, "state": state, "role": role, "config": config, "load": load, "metrics": metrics}


def run_of(*trials: dict[str, Any], requests: dict[int, Requests | None] | None = None) -> RunData:
    return RunData(Path("/nonexistent"), {"trials": list(trials), "decisions": []}, None, _cache=requests or {})


def requests(e2e_s: dict[int, float]) -> Requests:
    values = np.array(list(e2e_s.values()))
    return Requests(np.array(list(e2e_s)), values, values, values)


def test_a_speedup_is_off_over_on() -> None:
    run = run_of(trial(0, config("off", 0), 4, 3.0, "baseline"), trial(1, config("ngram", 2), 4, 2.0))
    assert speedups(run)[1].value == pytest.approx(1.5)


def test_a_speedup_uses_only_requests_that_both_completed() -> None:
    trials = trial(0, config("off", 0), 4, 9.0, "baseline"), trial(1, config("ngram", 2), 4, 9.0)
    records = {0: requests({1: 2.0, 2: 4.0, 3: 6.0, 9: 100.0}), 1: requests({1: 1.0, 2: 2.0, 3: 3.0, 4: 0.1})}
    assert speedups(run_of(*trials, requests=records))[1].value == pytest.approx(2.0)  # medians of requests 1, 2, 3: 4 ÷ 2


def test_what_quantization_gains_is_not_speculations() -> None:
    run = run_of(
        trial(0, config("off", 0), 4, 8.0, "baseline"),
        trial(1, config("off", 0, "int8"), 4, 4.0, "baseline"),
        trial(2, config("ngram", 2, "int8"), 4, 2.0),
    )
    assert speedups(run)[2].value == pytest.approx(2.0)  # against 4.0, not 8.0


def test_a_trial_without_its_own_off_has_no_speedup() -> None:
    run = run_of(trial(0, config("off", 0), 4, 8.0, "baseline"), trial(1, config("ngram", 2), 16, 2.0))
    assert speedups(run) == {}


def test_confirmation_is_held_against_confirmation() -> None:
    run = run_of(
        trial(0, config("off", 0), 4, 8.0, "baseline"),
        trial(1, config("ngram", 2), 4, 4.0, "confirm"),
        trial(2, config("off", 0), 4, 6.0, "confirm"),
    )
    on = run.trials[1]
    assert (baseline_of(run, on) or {})["number"] == 2
    (pair,) = pairs_of(run, "t", config("ngram", 2))
    assert (pair.off["number"], pair.on["number"]) == (2, 1)


def test_a_given_speedup_with_its_interval_stands() -> None:
    on = {**trial(1, config("ngram", 2), 4, 2.0), "speedup": {"metric": "e2e_p50", "value": 1.4, "ci95": [0.9, 1.9]}}
    gain = speedups(run_of(trial(0, config("off", 0), 4, 3.0, "baseline"), on))[1]
    assert (gain.value, gain.ci95, gain.verdict) == (1.4, (0.9, 1.9), "tie")


def test_a_map_says_why_a_cell_is_empty() -> None:
    run = run_of(
        trial(0, config("off", 0), 1, 3.0, "baseline"),
        trial(1, config("ngram", 2), 1, 2.0),
        trial(2, config("ngram", 2), 4, None),
        trial(3, config("ngram", 4), 1, 1.0),
    )
    (found,) = speedup_maps(run, "t")
    assert found.batch_sizes == (1, 4)
    cells = {label: [(c.speedup.value if c.speedup else None, c.note) for c in row] for label, row in found.rows}
    assert cells == {"K = 2": [(1.5, ""), (None, "failed")], "K = 4": [(3.0, ""), (None, "not measured")]}


def test_where_off_was_chosen_the_figures_show_the_finalist_it_beat() -> None:
    decision = result_of(RunSpec(requests=12, verdict="skip")).result["decisions"][0]
    assert decision["config"]["variant"] == "off"
    found = candidate_of(run_of(), decision)
    assert found is not None
    assert (found["variant"], found["k"]) == ("draft_model", 3)


def test_the_front_holds_what_no_other_beats_on_both() -> None:
    def point(trial: int, latency_s: float, tokens_per_s: float) -> Point:
        return Point("x", "off", trial, "", latency_s, tokens_per_s)

    points = [point(0, 1.0, 10.0), point(1, 2.0, 30.0), point(2, 2.5, 20.0), point(3, 1.0, 12.0), point(4, 3.0, 30.0)]
    assert [p.trial for p in pareto_front(points)] == [3, 1]


@pytest.mark.parametrize(
    ("speedup", "step"), [(1.0, "tie"), (1.02, "tie"), (0.98, "tie"), (1.1, "p1"), (2.5, "p4"), (0.9, "n1"), (0.5, "n4")]
)
def test_colour_steps_of_the_map(speedup: float, step: str) -> None:
    assert heat_class(speedup) == step
