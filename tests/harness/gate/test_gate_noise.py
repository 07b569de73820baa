"""The noise of earlier gates: what is kept of it, and what it may change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.gate.compare import changes
from harness.gate.decide import decide
from harness.gate.noise import MOST_FREEDOM, expectation, keep_noise, noise_file, read_noise
from harness.gate.statistics import Noise, mean_of
from harness.gate.types import Progress, Rules
from tests.harness.gate.blocks import blocks

REQUIRED = ("tau@8", "step@8", "e2e_p50@8", "throughput@8")


def known(sd: float, freedom: int = 40) -> dict[str, Noise]:
    return {key: Noise(sd**2, freedom) for key in REQUIRED} | {"tau@8": Noise(0.0, freedom)}


def test_what_is_kept_is_the_spread_around_each_gate_s_own_mean(tmp_path: Path) -> None:
    path = tmp_path / "noise.json"
    first, second = blocks(6, noise=0.02, seed=1), blocks(9, noise=0.02, slow=1.2, seed=2)
    keep_noise(path, {}, first)
    keep_noise(path, read_noise(path), second)
    parts = [np.var(changes("step@8", found), ddof=1) * (len(found) - 1) for found in (first, second)]
    kept = read_noise(path)["step@8"]
    assert kept.freedom == 5 + 8
    assert kept.variance == pytest.approx(sum(parts) / 13)


def test_old_gates_fade(tmp_path: Path) -> None:
    path = tmp_path / "noise.json"
    for seed in range(30):
        keep_noise(path, read_noise(path), blocks(8, noise=0.10, seed=seed))
    for seed in range(60):
        keep_noise(path, read_noise(path), blocks(8, noise=0.01, seed=seed))
    kept = read_noise(path)["step@8"]
    assert kept.freedom == MOST_FREEDOM
    assert kept.variance**0.5 == pytest.approx(0.01, rel=0.4)


def test_it_decides_where_a_few_blocks_alone_cannot() -> None:
    found, at_half = blocks(8, noise=0.02, seed=1), 0.5
    assert decide(found, Progress(fraction=0.35), at_half, Rules()).verdict.outcome == "inconclusive"
    assert decide(found, Progress(fraction=0.35), at_half, Rules(), known(0.02)).verdict.outcome == "pass"


def test_a_quiet_past_does_not_pass_a_noisy_present() -> None:
    found = blocks(8, noise=0.11, seed=3)
    assert decide(found, Progress(fraction=0.35), 0.5, Rules(), known(0.005)).verdict.outcome == "inconclusive"


def test_few_blocks_that_look_quiet_by_luck_do_not_pass_where_the_machine_is_known_to_be_noisy() -> None:
    found = blocks(8, noise=0.004, seed=3)
    assert decide(found, Progress(fraction=0.35), 0.5, Rules()).verdict.outcome == "pass"
    assert decide(found, Progress(fraction=0.35), 0.5, Rules(), known(0.11)).verdict.outcome == "inconclusive"


def test_pooling_is_that_of_two_samples_of_one_variance() -> None:
    mean = mean_of([0.0, 0.02, 0.04, 0.02, 0.01])
    steadied = mean.steadied(Noise(0.015**2, 20))
    assert steadied.freedom == 24
    assert steadied.sd == pytest.approx(((0.015**2 * 20 + np.var([0.0, 0.02, 0.04, 0.02, 0.01], ddof=1) * 4) / 24) ** 0.5)
    assert steadied.value == mean.value
    assert mean.steadied(None) is mean


def test_the_expectation_names_the_metric_that_needs_most_pairs() -> None:
    line = expectation({**known(0.01), "e2e_p50@8": Noise(0.03**2, 10)}, Rules())
    # (2.326 + 1.282)² × (0.03 ÷ ln 1.03)² = 13.4 blocks
    assert line == "E2E p50 had 3.0% of noise per two pairs in earlier gates here: about 28 pairs decide"
    assert expectation({}, Rules()) is None


def test_a_broken_file_is_as_good_as_none(tmp_path: Path) -> None:
    path = noise_file("sha256:0", {"label": "a"}, {"trace": "b"})
    assert path != noise_file("sha256:1", {"label": "a"}, {"trace": "b"})
    assert read_noise(path) == {}
    (tmp_path / "x.json").write_text('{"step@8": {"variance": "?"}}')
    assert read_noise(tmp_path / "x.json") == {}
