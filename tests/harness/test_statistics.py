from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from harness.replicates import noise_floor, paired_runs, pairs_needed, replay_interval, verdict
from harness.statistics import (
    closed_throughput,
    groups_of,
    order_statistic_interval,
    order_statistics_needed,
    paired_speedup,
    paired_throughput,
    quantile_estimate,
    ratio_estimate,
    requests_needed,
)


def table(e2e: list[float], tokens: list[int] | None = None, status: list[str] | None = None) -> pa.Table:
    n = len(e2e)
    return pa.table(
        {
            "index": range(n),
            "status": status or ["completed"] * n,
            "e2e_s": e2e,
            "output_tokens": tokens or [10] * n,
            "session": pa.array([None] * n, pa.string()),
        }
    )


def test_samples_that_order_statistics_need() -> None:
    assert (order_statistics_needed(0.95), order_statistics_needed(0.99)) == (72, 368)
    assert (requests_needed(0.5), requests_needed(0.95), requests_needed(0.99)) == (60, 300, 368)


def test_median_interval_has_the_textbook_ranks() -> None:
    values = np.arange(1.0, 101.0)  # n = 100: ranks 40 and 60 (P = 0.954); smaller pairs enclose less than 95 %
    low, high = order_statistic_interval(values, 0.5) or (0, 0)
    assert (high - low, low in (40.0, 41.0)) == (20.0, True)
    assert order_statistic_interval(np.arange(5.0), 0.5) is None


def test_too_few_requests_give_a_value_and_say_how_many_it_takes() -> None:
    found = quantile_estimate(np.arange(59.0), 0.5)
    assert (found.value, found.ci95) == (29.0, None)
    assert "needs 60" in (found.note or "")
    assert quantile_estimate(np.arange(1.0, 61.0), 0.5).ci95 is not None
    assert quantile_estimate(np.arange(299.0), 0.95).ci95 is None


def test_a_ratio_is_weighted_by_tokens() -> None:
    assert ratio_estimate(np.array([2.0, 90.0]), np.array([2.0, 30.0])).value == pytest.approx(92 / 32)


def test_pairs_use_only_requests_that_both_completed() -> None:
    off = table([2.0, 4.0, 100.0], status=["completed", "completed", "failed"])
    assert paired_speedup(off, table([1.0, 2.0, 3.0])).value == 2.0
    assert paired_throughput(off, table([1.0, 2.0, 3.0])).value == 2.0
    assert math.isnan(paired_speedup(off, table([])).value)


def test_a_constant_speedup_has_an_interval_of_no_width() -> None:
    on = list(np.random.default_rng(0).lognormal(size=80))
    assert paired_speedup(table([1.5 * x for x in on]), table(on)).ci95 == pytest.approx((1.5, 1.5))


def test_sessions_are_drawn_whole() -> None:
    assert groups_of([None, "a", None]) is None
    groups = groups_of([f"s{i // 10}" for i in range(600)])
    rng = np.random.default_rng(1)
    values = np.repeat(rng.lognormal(size=60), 10)  # ten equal turns in a session: 60 values, not 600
    clustered, naive = quantile_estimate(values, 0.5, groups).ci95, quantile_estimate(values, 0.5).ci95
    assert clustered is not None
    assert naive is not None
    assert clustered[1] - clustered[0] > 2 * (naive[1] - naive[0])


def covered(estimate: object, truth: float) -> bool:
    low, high = estimate.ci95  # type: ignore[attr-defined]
    return bool(low <= truth <= high)


def test_intervals_cover_the_truth() -> None:
    """400 samples each of lognormal latencies: 95 % ± three standard errors of a share of 400."""
    rng = np.random.default_rng(2)
    hits = np.zeros(4)
    for _ in range(400):
        base = rng.lognormal(sigma=0.5, size=80)
        off, on = base * 1.3 * rng.lognormal(sigma=0.1, size=80), base * rng.lognormal(sigma=0.1, size=80)
        hits += (
            covered(quantile_estimate(base, 0.5), 1.0),
            covered(quantile_estimate(rng.lognormal(sigma=0.5, size=320), 0.95), math.exp(0.5 * 1.6448536)),
            covered(paired_speedup(table(list(off)), table(list(on))), 1.3),
            covered(ratio_estimate(3 * base, base + rng.normal(0, 0.01, 80)), 3.0),
        )
    assert (hits / 400 > 0.917).all(), hits / 400
    assert (hits / 400 < 0.983).all(), hits / 400


def test_an_open_loop_has_an_interval_from_five_replays_on() -> None:
    assert replay_interval([1.0, 2.0, 3.0, 4.0]).ci95 is None
    low, high = replay_interval([1.0, 2.0, 3.0, 4.0, 5.0]).ci95 or (0, 0)
    assert (low, high) == pytest.approx((3 - 2.1202, 3 + 2.1202), abs=1e-3)  # t(4) at 0.98 = 2.9985, sd 1.5811, n 5


def test_equal_runs_differ_in_five_percent_and_a_five_percent_change_is_found() -> None:
    """Ten interleaved pairs of 30 requests an arm with 2 % run-to-run noise."""
    rng = np.random.default_rng(3)
    same = [verdict(paired_runs(rng.normal(1, 0.02, 10), rng.normal(1, 0.02, 10))) for _ in range(1000)]
    assert sum(v != "inconclusive" for v in same) <= 65  # 50 expected, two standard errors
    faster = [verdict(paired_runs(1.05 * rng.normal(1, 0.02, 10), rng.normal(1, 0.02, 10))) for _ in range(1000)]
    assert sum(v == "better" for v in faster) >= 900


def test_noise_of_eleven_percent_is_inconclusive_and_says_what_would_decide() -> None:
    rng = np.random.default_rng(4)
    logs = rng.normal(0, 0.11 * math.sqrt(2), 10)
    assert verdict(paired_runs(list(np.exp(logs) * 1.05), [1.0] * 10)) == "inconclusive"
    assert pairs_needed(noise_floor([0.11 * math.sqrt(2)] * 4), 0.05) == pytest.approx(107, abs=4)


def test_equivalence_needs_the_whole_interval_inside_the_margin() -> None:
    assert verdict(paired_runs([1.0, 1.001, 0.999, 1.0, 1.001], [1.0] * 5), margin=0.02) == "equivalent"


def test_throughput_is_resampled_in_stretches_of_requests_that_delayed_each_other() -> None:
    """Long prompts of every tenth request delay the whole stretch beside it: single requests would seem nearly equal."""
    rng = np.random.default_rng(5)
    delay = np.repeat(rng.exponential(1.0, 40), 8)  # 320 requests, 4 at a time: stretches of 8
    tokens, times = np.full(320, 100.0), 1 + delay
    single, blocks = ratio_estimate(4 * tokens, times).ci95, closed_throughput(tokens, times, 4).ci95
    assert single is not None
    assert blocks is not None
    assert 2.0 < (blocks[1] - blocks[0]) / (single[1] - single[0]) < 3.2  # sqrt(8) = 2.8, less what blocks cut apart
    few = closed_throughput(tokens[:80], times[:80], 16)
    assert (few.ci95, few.value) == (None, pytest.approx(16 * 100 / times[:80].mean()))
    assert "needs 96" in (few.note or "")
