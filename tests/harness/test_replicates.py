"""Several runs of each side: what they say together, and that it holds against run-to-run noise."""

import math

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from harness.replicates import EITHER_QUANTILE, paired_runs, speedup_of_runs, throughput_of_runs
from harness.statistics import Estimate, paired_speedup


def table(e2e: np.ndarray, first: int = 0, tokens: int = 10, status: list[str] | None = None) -> pa.Table:
    n = len(e2e)
    return pa.table(
        {
            "index": range(first, first + n),
            "status": status or ["completed"] * n,
            "e2e_s": e2e,
            "output_tokens": [tokens] * n,
            "session": pa.array([None] * n, pa.string()),
        }
    )


def test_two_pairs_have_the_interval_of_student_s_t_with_one_degree_of_freedom() -> None:
    found = paired_runs([1.1, 1.3], [1.0, 1.0])
    assert found.value == pytest.approx(math.sqrt(1.1 * 1.3))
    half = 12.706 * math.log(1.3 / 1.1) / 2  # standard error of two values: half their distance
    assert found.ci95 == pytest.approx((found.value / math.exp(half), found.value * math.exp(half)), rel=1e-3)


def test_one_pair_of_runs_gives_the_interval_of_these_runs() -> None:
    rng = np.random.default_rng(0)
    off, on = table(rng.lognormal(size=80)), table(rng.lognormal(size=80))
    assert speedup_of_runs([off], [on]) == paired_speedup(off, on)
    assert paired_runs([1.0], [1.0]).ci95 is None


def test_two_pairs_of_the_same_requests_have_two_degrees_of_freedom() -> None:
    found = paired_runs([1.1, 1.3], [1.0, 1.0], 0.0)
    assert half(found) == pytest.approx(stats.t.ppf(EITHER_QUANTILE, 2) * math.log(1.3 / 1.1) / 2, rel=1e-3)


def test_a_machine_that_changes_from_pair_to_pair_costs_no_certainty() -> None:
    """The medians that one real run gave: off and on in three rounds, the first of them on a slow machine."""
    found = paired_runs([2.792, 1.746, 1.776], [2.038, 1.233, 1.239], 0.0)
    assert found.value == pytest.approx(1.406, abs=1e-3)
    assert half(found) < 0.08


@pytest.mark.parametrize("drift", [0.0, 0.01, 0.3])
@pytest.mark.parametrize("pairs", [2, 3])
def test_few_pairs_of_the_same_requests_cover_what_they_say_with_drift_and_without(pairs: int, drift: float) -> None:
    rng = np.random.default_rng(pairs)
    held = 0
    for _ in range(3000):
        machine = rng.normal(0.0, drift, pairs)
        off, on = (np.exp(machine + rng.normal(0.0, 0.01, pairs)) for _ in range(2))
        ci95 = paired_runs(off.tolist(), on.tolist(), 0.0).ci95
        held += ci95 is not None and ci95[0] <= 1.0 <= ci95[1]
    assert 0.938 < held / 3000 < 0.978


def test_variance_common_to_all_pairs_widens_and_stiffens_the_interval() -> None:
    off = [1.0, 1.02, 1.04, 1.06]
    alone, joined = paired_runs(off, [1.0] * 4), paired_runs(off, [1.0] * 4, 0.01**2)
    assert half(joined) < half(alone) * math.sqrt(1 + 0.01**2 / (0.0251**2 / 4))  # more degrees of freedom, smaller t
    z = stats.norm.ppf(EITHER_QUANTILE)
    assert half(paired_runs([1.0, 1.0], [1.0, 1.0], 0.01**2)) == pytest.approx(z * 0.01, rel=1e-3)


def half(found: Estimate) -> float:
    assert found.ci95 is not None
    return math.log(found.ci95[1] / found.ci95[0]) / 2


def test_runs_must_come_in_pairs_and_share_requests() -> None:
    values = np.ones(70)
    with pytest.raises(ValueError, match="argument"):
        speedup_of_runs([table(values)] * 2, [table(values)] * 3)
    apart = speedup_of_runs([table(values), table(values, 100)], [table(values, 500), table(values, 900)])
    assert math.isnan(apart.value)


def test_a_request_that_failed_in_one_run_is_left_out_of_all() -> None:
    slow = np.r_[np.full(69, 2.0), 900.0]
    failed = table(slow, status=["completed"] * 69 + ["failed"])
    assert speedup_of_runs([failed, table(slow)], [table(np.ones(70))] * 2).value == pytest.approx(2.0)
    assert throughput_of_runs([failed, table(slow)], [table(np.ones(70))] * 2).value == pytest.approx(2.0)


def test_parts_count_together_and_too_few_say_so() -> None:
    rng = np.random.default_rng(1)
    parts = [rng.lognormal(size=20) for _ in range(3)]
    off = [table(1.2 * part, 100 * i) for i, part in enumerate(parts)]
    on = [table(part, 100 * i) for i, part in enumerate(parts)]
    assert speedup_of_runs(off, on).value == pytest.approx(1.2)
    assert speedup_of_runs(off, on).ci95 == pytest.approx((1.2, 1.2))
    few = speedup_of_runs(off[:2], on[:2])
    assert (few.ci95, few.note) == (None, "40 requests are too few for an interval of the speed-up of p50: it needs 60")


@pytest.mark.parametrize("same", [True, False])
def test_the_interval_covers_the_truth_whether_runs_repeat_requests_or_share_them_out(same: bool) -> None:
    """200 comparisons of four pairs: 3 % run-to-run noise, a speed-up that differs by request, noise of each request's own."""
    rng = np.random.default_rng(2)
    hits, comparisons = 0, 200
    for _ in range(comparisons):
        off, on = [], []
        size = 80 if same else 30
        base, gain = rng.lognormal(0, 0.6, size), rng.lognormal(math.log(1.2), 0.2, size)
        for run in range(4):
            if not same:
                base, gain = rng.lognormal(0, 0.6, size), rng.lognormal(math.log(1.2), 0.2, size)
            noise = np.exp(rng.normal(0, 0.03, 2))
            first = 0 if same else 1000 * run
            off.append(table(base * noise[0] * rng.lognormal(0, 0.05, size), first))
            on.append(table(base / gain * noise[1] * rng.lognormal(0, 0.05, size), first))
        low, high = speedup_of_runs(off, on).ci95 or (0.0, 0.0)
        hits += low <= 1.2 <= high
    assert 0.905 <= hits / comparisons <= 0.99  # 95 % with three standard errors of a share of 200
