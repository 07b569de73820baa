"""Error control: what the looks spend, Holm's correction, t-tests with known answers."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from harness.gate.statistics import blocks_to_decide, divergence_p, holm, level, mean_of, mean_of_groups


def test_p_value_and_interval_are_those_of_the_one_sample_t_test() -> None:
    values = [0.01, 0.03, 0.02, 0.05, 0.0, 0.04]
    mean = mean_of(values)
    assert mean.p_above(0.01) == pytest.approx(stats.ttest_1samp(values, 0.01, alternative="greater").pvalue)
    assert mean.p_below(0.06) == pytest.approx(stats.ttest_1samp(values, 0.06, alternative="less").pvalue)
    assert mean.interval() == pytest.approx(stats.ttest_1samp(values, 0).confidence_interval(0.95))


def test_one_value_proves_nothing() -> None:
    mean = mean_of([0.5])
    assert mean.p_above(0.0) == mean.p_below(1.0) == 1.0
    assert mean.interval() is None


def test_groups_count_alike_and_what_a_group_shares_is_no_noise() -> None:
    first, second = [0.03, 0.05, 0.04], [-0.03, -0.01, -0.04, -0.02, -0.05]
    mean = mean_of_groups([first, second])
    two_sample = stats.ttest_ind(first, [-value for value in second], alternative="greater")  # mean of first + mean of second
    assert mean.p_above(0.0) == pytest.approx(two_sample.pvalue)
    assert mean.value == pytest.approx((0.04 - 0.03) / 2)
    assert mean.freedom == 6
    assert mean_of_groups([first, []]) == mean_of(first)
    assert mean_of_groups([[0.03], [-0.03]]).interval() is None


def test_values_that_never_vary_are_certain() -> None:
    assert mean_of([0.05] * 4).p_above(0.0) < 1e-9
    assert mean_of([0.0] * 4).p_above(0.0) == 0.5
    assert mean_of([0.0] * 4).p_below(0.02) < 1e-9


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=12))
def test_no_sequence_of_looks_spends_more_than_alpha(fractions: list[float]) -> None:
    looks = [0.0, *sorted(fractions)]
    assert sum(level(0.05, a, b) for a, b in pairwise(looks)) <= 0.05 + 1e-12


def test_the_last_look_has_what_the_others_left() -> None:
    assert level(0.01, 0.0, 0.5) == pytest.approx(0.0025)
    assert level(0.01, 0.5, 1.0) == pytest.approx(0.0075)


def test_holm_on_a_worked_example() -> None:
    # Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1, made non-decreasing.
    assert holm({"d": 0.04, "a": 0.01, "c": 0.03, "b": 0.02}) == pytest.approx({"a": 0.04, "b": 0.06, "c": 0.06, "d": 0.06})


def test_blocks_to_decide_grow_with_the_square_of_the_noise() -> None:
    # (2.326 + 1.282)² × (0.02 ÷ 0.03)² = 5.8; ten times the noise needs a hundred times the blocks.
    assert blocks_to_decide(0.02, 0.0, 0.03, 0.01) == 6
    assert blocks_to_decide(0.2, 0.0, 0.03, 0.01) == pytest.approx(579, abs=1)


def test_an_effect_near_the_band_needs_more_blocks_than_one_far_from_it() -> None:
    assert blocks_to_decide(0.02, 0.028, 0.03, 0.01) > blocks_to_decide(0.02, 0.06, 0.03, 0.01)


def test_divergence_is_judged_against_the_baseline_s_own() -> None:
    assert divergence_p(5, 0) == pytest.approx(1 / 32)
    assert divergence_p(0, 0) == 1.0
    assert divergence_p(4, 4) > 0.5
    assert math.isclose(divergence_p(3, 1), 5 / 16)
