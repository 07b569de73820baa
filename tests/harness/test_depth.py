"""Overhead, rules of thumb and sensitivity: each known answer can be worked out by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.decide import BatchEvidence, Ratio
from harness.overhead import overhead, regime_of, step_elasticity
from harness.result import grouped
from harness.rules_of_thumb import Deployment, grounded_share, rules_of_thumb
from harness.sensitivity import acceptance_what_ifs, load_what_ifs, tau_with


def test_a_step_that_takes_as_long_at_any_batch_is_memory_bound() -> None:
    steps = [(1, 0.030), (4, 0.030), (16, 0.120)]
    assert step_elasticity(steps, at_batch=2) == 0.0
    assert step_elasticity(steps, at_batch=9) == pytest.approx(1.0)  # four times the batch, four times the time
    assert step_elasticity(steps, at_batch=500) == pytest.approx(1.0)  # the nearest pair
    assert [regime_of(e) for e in (0.0, 0.5, 1.0)] == ["memory-bound", "between", "compute-bound"]
    assert step_elasticity([(1, 0.03)], at_batch=1) is None


def test_overhead_says_what_speculation_takes() -> None:
    found = overhead(
        [(1, 0.03), (4, 0.06)],
        2.0,
        1.6,
        kv_cache_tokens=(10_000, 8_000),
        mean_request_tokens=400.0,
        startup_s=(10.0, 25.0),
    )
    assert found.step_time_elasticity == pytest.approx(0.5)
    assert found.draft_and_verify_share == pytest.approx(0.375)
    assert (found.concurrency_ceiling_off, found.concurrency_ceiling_on) == (25.0, 20.0)
    text = " ".join(found.reasons())
    assert "20.0% of the KV cache: 20 requests of mean length fit instead of 25" in text
    assert "25 s instead of 10 s" in text
    assert "twice the batch takes 1.41x the time" in text


def test_what_is_not_measured_is_not_said() -> None:
    nothing = overhead([], 1.0, None)
    assert nothing.reasons() == []
    assert set(nothing.to_dict().values()) == {None}


DEPLOYMENT = Deployment(
    mean_batch=6.0,
    objective="e2e_p50",
    parameters=70e9,
    published_heads=2,
    peak_kv_share=0.4,
    preemptions=0,
    grounded_share=0.05,
    draft_free=False,
)


def says(deployment: Deployment) -> list[str | None]:
    return [rule.says for rule in rules_of_thumb(deployment, None)]


def test_rules_of_thumb_say_on_for_the_textbook_case_and_off_for_its_opposite() -> None:
    assert says(DEPLOYMENT) == ["on", "on", "on", "on", "on", None]
    opposite = Deployment(64.0, "throughput", 8e9, 0, 0.95, 3, 0.05, draft_free=True)
    assert says(opposite) == ["off", "off", "off", None, "off", "off"]
    assert says(Deployment(24.0, "e2e_p50", None, 0, None, None, 0.5, draft_free=True)) == [None, "on", None, None, None, "on"]


def test_a_rule_agrees_only_where_both_it_and_the_measurement_say_something() -> None:
    agrees = [rule.agrees for rule in rules_of_thumb(DEPLOYMENT, "off")]
    assert agrees == [False] * 5 + [None]
    assert {rule.agrees for rule in rules_of_thumb(DEPLOYMENT, None)} == {None}
    assert rules_of_thumb(DEPLOYMENT, "on")[0].here == "average batch size 6.0"


def test_grounded_share_counts_three_word_sequences_of_the_prompt() -> None:
    # the output has 4 trigrams; "the quick brown" and "quick brown fox" stand in the prompt
    assert grounded_share([("see The quick brown fox jump", "the quick brown fox ran away")]) == 0.5
    assert grounded_share([("a", "b c")]) is None


def test_tau_follows_from_conditional_acceptance() -> None:
    # conditional 0.6 and 0.5: 1 + 0.6 + 0.3; each 0.1 higher: 1 + 0.7 + 0.7 * 0.6
    assert tau_with((0.6, 0.3), 1.0, 0.0) == pytest.approx(1.9)
    assert tau_with((0.6, 0.3), 1.0, 0.1) == pytest.approx(1 + 0.7 + 0.42)
    # half of the steps have a draft: conditional 0.6 of those
    assert tau_with((0.3, 0.15), 0.5, 0.1) == pytest.approx(1 + 0.5 * 0.7 + 0.5 * 0.7 * 0.6)


@settings(deadline=None)
@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8), st.floats(0.05, 1.0))
def test_tau_unshifted_is_one_plus_the_rates_and_never_beyond_its_bounds(conditionals: list[float], share: float) -> None:
    rates, reached = [], share
    for c in conditionals:
        reached *= c
        rates.append(reached)
    assert tau_with(rates, share, 0.0) == pytest.approx(1 + math.fsum(rates))
    assert 1.0 <= tau_with(rates, share, -0.1) <= tau_with(rates, share, 0.1) <= 1 + share * len(rates) + 1e-9


def test_lower_acceptance_can_change_the_verdict() -> None:
    # all of the time is decoding, so the speed-up scales with tau: 1.1 * 1.5 / 1.6 and 1.1 * 1.7 / 1.6
    low, high = acceptance_what_ifs(Ratio(1.1, (1.05, 1.15)), (0.6,), 1.0, 1.0)
    assert low.speedup == pytest.approx(1.1 * 1.5 / 1.6)
    assert high.speedup == pytest.approx(1.1 * 1.7 / 1.6)
    assert (low.outcome, low.changes_verdict) == ("no clear winner", True)
    assert (high.outcome, high.changes_verdict) == ("on", False)
    # half of the time is the first token's, which acceptance does not shorten
    half, _ = acceptance_what_ifs(Ratio(1.1, None), (0.6,), 1.0, 0.5)
    assert half.speedup == pytest.approx(1.1 / (0.5 + 0.5 * 1.6 / 1.5))
    assert low.to_dict()["predicted"] is True


def at(batch: int, value: float) -> BatchEvidence:
    return BatchEvidence(batch, Ratio(value, None), None, Ratio(value, None), 2.0)


def test_more_load_moves_along_the_measured_curve_and_never_beyond_it() -> None:
    curve = [at(4, 2.0), at(16, 0.5)]  # log speed-up falls by log 4 over log 4: speed-up = 8 / batch
    down, up = load_what_ifs(Ratio(1.0, (0.99, 1.01)), curve, mean_batch=8.0)
    assert down.speedup == pytest.approx(2.0)
    assert up.speedup == pytest.approx(8 / 12)
    assert (down.outcome, up.outcome) == ("on", "off")
    _, beyond = load_what_ifs(Ratio(1.0, (0.99, 1.01)), curve, mean_batch=12.0)
    assert beyond.speedup is None
    assert beyond.note == "beyond the measured batch sizes"


def test_warnings_of_one_kind_are_one_line() -> None:
    stable = ["warm-up did not become stable: ms per step 4.1", "warm-up did not become stable: ms per step 7.5"]
    found = grouped([[stable[0]], [stable[1], "the draft is dead"], ["the draft is dead"], ["another thing"]])
    assert found == [f"{stable[0]} (2 trials warn of this)", "the draft is dead (2 trials warn of this)", "another thing"]
