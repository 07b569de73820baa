from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.types import ServingConfig
from harness.decide import BatchEvidence, Evidence, Ratio, break_even_batch, judge, schedule

NGRAM = ServingConfig(backend="reference", model="m", variant="ngram", k=4)


def at(batch: int, low: float, high: float, throughput: tuple[float, float] | None = None) -> BatchEvidence:
    """Evidence at one batch size whose speed-up interval is (low, high)."""
    ratio = Ratio((low * high) ** 0.5, (low, high))
    t_low, t_high = throughput or (low, high)
    return BatchEvidence(batch, ratio, None, Ratio((t_low * t_high) ** 0.5, (t_low, t_high)), tau=2.0)


def world(*rows: BatchEvidence, mean_batch: float = 4.0, schedule: tuple[tuple[int, int], ...] = ()) -> Evidence:
    weights = {row.batch_size: 1 / len(rows) for row in rows}
    return Evidence(NGRAM, rows, weights, mean_batch, None, None, schedule)


def test_better_at_every_batch_size_is_enable() -> None:
    found = judge(world(at(1, 1.4, 1.6), at(4, 1.2, 1.4), at(16, 1.05, 1.2), schedule=((1, 6), (4, 4), (16, 2))))
    assert found.verdict == "enable"
    assert found.k_by_batch_size == ((1, 1, 6), (2, 4, 4), (5, 16, 2))
    assert found.below_batch is None


def test_worse_at_every_batch_size_is_skip() -> None:
    found = judge(world(at(1, 0.8, 0.9), at(4, 0.6, 0.8)))
    assert found.verdict == "skip"
    assert found.k_by_batch_size == ()


@pytest.mark.parametrize("interval", [(0.92, 1.22), (1.02, 1.1), (0.8, 0.9)])
def test_a_drafter_of_which_nothing_is_accepted_is_skip_whatever_the_times_say(interval: tuple[float, float]) -> None:
    dead = world(*(replace(at(batch, *interval), tau=tau) for batch, tau in ((1, 1.0), (4, 1.003))))
    found = judge(dead)
    assert found.verdict == "skip"
    assert "at most 1.003 tokens per step" in found.reasons[0]
    half_known = replace(dead, by_batch=(dead.by_batch[0], replace(dead.by_batch[1], tau=None)))
    assert judge(half_known).verdict == judge(world(at(1, *interval), at(4, *interval))).verdict


def test_a_throughput_that_rises_by_more_than_tau_decides_nothing() -> None:
    """A step with speculation is no cheaper than one without: the machine was slower while off was measured."""
    impossible = world(replace(at(1, 2.3, 2.9), tau=1.4), at(4, 1.1, 1.2))
    found = judge(impossible)
    assert found.verdict == "no_clear_winner"
    assert "at batch size 1, with tau at 1.40" in found.reasons[0]
    assert "by a factor of 1.64 at least" in found.reasons[0]
    assert found.k_by_batch_size == ()
    unsure = world(replace(at(1, 1.4, 4.7), tau=1.4), at(4, 1.1, 1.2))  # its interval holds what tau allows
    assert judge(unsure).verdict == "enable"
    uneven = world(replace(at(1, 2.3, 2.9, throughput=(1.2, 1.4)), tau=1.4))  # a median may gain more than the mean
    assert judge(uneven).verdict == "enable"


def test_better_below_and_worse_above_is_enable_below_the_crossing() -> None:
    # log speed-up falls from log 2 at batch 1 to -log 2 at batch 16: it crosses 0 at the middle on the log scale, 4.
    found = judge(world(at(1, 1.9, 2 * 2 / 1.9), at(16, 0.475, 0.25 / 0.475), mean_batch=1.0, schedule=((1, 4), (16, 4))))
    assert found.verdict == "enable_below_batch"
    assert found.break_even["value"] == pytest.approx(4.0)
    assert found.below_batch == 4
    assert found.k_by_batch_size == ((1, 1, 4), (2, 16, 0))


def test_intervals_that_hold_one_are_no_clear_winner() -> None:
    assert judge(world(at(1, 0.97, 1.04), at(4, 0.95, 1.05))).verdict == "no_clear_winner"


def test_a_win_on_latency_does_not_pass_over_a_loss_of_throughput() -> None:
    found = judge(world(at(4, 1.1, 1.2, throughput=(0.8, 0.9))))
    assert found.verdict == "skip"


def test_a_worse_p95_blocks_and_an_untested_one_does_not() -> None:
    row = BatchEvidence(4, Ratio(1.3, (1.2, 1.4)), Ratio(0.8, (0.7, 0.9)), Ratio(1.2, (1.1, 1.3)), 2.0)
    assert judge(world(row)).verdict == "skip"
    untested = BatchEvidence(4, Ratio(1.3, (1.2, 1.4)), Ratio(0.8, None), Ratio(1.2, (1.1, 1.3)), 2.0)
    found = judge(world(untested))
    assert found.verdict == "enable"
    assert any("not tested" in reason for reason in found.reasons)


def test_better_only_below_the_traces_own_batch_size_is_enable_below() -> None:
    found = judge(world(at(1, 1.2, 1.4), at(4, 0.97, 1.05), mean_batch=4.0))
    assert found.verdict == "enable_below_batch"
    assert found.below_batch == 2


def test_no_interval_anywhere_is_not_measurable() -> None:
    row = BatchEvidence(1, Ratio(1.5, None), None, Ratio(1.5, None), 2.0)
    assert judge(world(row)).verdict == "not_measurable"
    assert judge(Evidence(NGRAM, (), {}, None, None, None)).verdict == "not_measurable"


def test_the_batch_size_nearest_to_the_traces_mean_decides() -> None:
    rows = (at(1, 1.5, 1.7), at(16, 0.97, 1.03))
    assert judge(world(*rows, mean_batch=1.5)).verdict == "enable"
    assert world(*rows, mean_batch=12.0).deciding().batch_size == 16  # type: ignore[union-attr]


def test_step_cost_ratio_is_tau_times_token_time() -> None:
    # 2 tokens a step at 60 ms a token against 50 ms a token: a step takes 120 ms, 2.4 times the step without speculation.
    row = BatchEvidence(1, Ratio(0.8, (0.7, 0.9)), None, Ratio(0.8, (0.7, 0.9)), 2.0, tpot_off_s=0.05, tpot_on_s=0.06)
    assert row.step_cost_ratio == pytest.approx(2.4)


def test_throughput_is_weighted_by_the_traces_batch_sizes() -> None:
    rows = (at(1, 2.0, 2.0), at(16, 0.5, 0.5))
    heavy = Evidence(NGRAM, rows, {1: 0.25, 16: 0.75}, 8.0, None, None)
    assert heavy.throughput().value == pytest.approx(2.0**0.25 * 0.5**0.75)  # type: ignore[union-attr]


def test_no_crossing_is_no_break_even() -> None:
    assert break_even_batch([at(1, 1.2, 1.3), at(16, 1.1, 1.2)]) == {"value": None, "ci95": None}


def test_the_interval_of_the_break_even_is_where_both_ends_cross() -> None:
    rows = [at(1, 1.5, 2.0), at(4, 1.1, 1.5), at(16, 0.4, 0.9)]
    found = break_even_batch(rows)
    low, high = found["ci95"]
    assert 4 < low < found["value"] < high < 16


@given(
    st.lists(st.tuples(st.integers(1, 256), st.integers(0, 8)), min_size=1, max_size=8, unique_by=lambda pair: pair[0]),
    st.data(),
)
def test_a_schedule_covers_each_batch_size_once_and_ends_at_the_largest_measured(
    best: list[tuple[int, int]], data: st.DataObject
) -> None:
    best = sorted(best)
    wins = data.draw(st.lists(st.sampled_from([batch for batch, _ in best]), unique=True))
    rows = schedule(best, wins, None)
    covered = [batch for first, last, _ in rows for batch in range(first, last + 1)]
    assert covered == list(range(1, best[-1][0] + 1))
    for batch, k in best:
        (row,) = [row for row in rows if row[0] <= batch <= row[1]]
        assert row[2] == (k if batch in wins else 0)


def test_a_win_no_larger_than_the_drift_of_off_is_no_enable() -> None:
    narrow = world(at(4, 1.001, 1.08))
    assert judge(narrow).verdict == "enable"
    drifted = judge(replace(narrow, drift=1.04))
    assert drifted.verdict == "no_clear_winner"
    assert drifted.speedup is not None
    assert drifted.speedup.ci95 == pytest.approx((1.001 / 1.04, 1.08 * 1.04))
    assert any("Off itself changed by 4.0 %" in reason for reason in drifted.reasons)


def test_a_win_well_above_the_drift_stands_and_so_does_a_loss() -> None:
    assert judge(replace(world(at(4, 1.2, 1.3)), drift=1.04)).verdict == "enable"
    assert judge(replace(world(at(4, 0.7, 0.8)), drift=1.04)).verdict == "skip"


@settings(deadline=None)
@given(st.floats(0.5, 2.0), st.floats(0.0, 0.3), st.floats(1.0, 1.2), st.floats(1.0, 1.2))
def test_more_drift_never_makes_a_verdict_surer(middle: float, half: float, drift: float, more: float) -> None:
    row = at(4, middle * (1 - half), middle * (1 + half))
    less_sure = judge(replace(world(row), drift=drift * more)).verdict
    if judge(replace(world(row), drift=drift)).verdict == "no_clear_winner":
        assert less_sure == "no_clear_winner"


def test_drift_widens_the_combined_throughput_once() -> None:
    rows = (at(1, 0.99, 1.01), at(16, 0.99, 1.01))
    still, moved = (Evidence(NGRAM, rows, {1: 0.5, 16: 0.5}, 4.0, None, None, drift=d).throughput() for d in (1.0, 1.1))
    assert still == Ratio(pytest.approx(1.0, abs=1e-4), (pytest.approx(1 / 1.0071, abs=1e-3), pytest.approx(1.0071, abs=1e-3)))
    assert moved is not None
    assert moved.ci95 == pytest.approx((1 / 1.0071 / 1.1, 1.0071 * 1.1), abs=1e-3)


def test_steps_without_a_draft_are_one_note_beside_tau() -> None:
    row = replace(at(4, 1.2, 1.3), drafted_share=0.31, tau_drafted=4.2)
    (line,) = [r for r in judge(world(row)).reasons if "had a draft" in r]
    assert line == "Acceptance length tau is 2.00 tokens per step (31% of steps had a draft: 4.20 over those)."


def test_a_single_replay_at_the_traces_own_load_that_points_the_other_way_is_a_warning() -> None:
    sure = world(at(4, 1.2, 1.3))
    against = judge(replace(sure, open_e2e_p50=Ratio(0.6, None)))
    assert against.verdict == "enable"
    assert any("points the other way (0.60x)" in warning for warning in against.warnings)
    assert judge(replace(sure, open_e2e_p50=Ratio(1.4, None))).warnings == ()
