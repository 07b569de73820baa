import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.matchers import NgramIndex
from harness.funnel.acceptance import Curve, from_loads, from_recorded, geometric_rates
from harness.funnel.observation import Observation
from harness.offline import Recorded, ngram_acceptance, pool
from tests.harness.funnel.loads import RATES, noisy, observe, on


def test_one_load_at_the_largest_k_gives_tau_at_every_smaller_k() -> None:
    curve = from_loads([observe(on("eagle3", 6), 16)])
    for k in range(1, 7):
        measured = observe(on("eagle3", k), 16).tau
        assert curve.tau(k).value == pytest.approx(measured, rel=0.03)
        assert curve.tau(k).value == pytest.approx(1 + sum(RATES[:k]), rel=0.05)


def test_tau_is_not_known_beyond_the_measured_k() -> None:
    with pytest.raises(ValueError, match="known up to 3, not 4"):
        from_loads([observe(on("eagle3", 3), 4)]).tau(4)


def test_the_interval_of_tau_covers_the_truth_about_as_often_as_it_says() -> None:
    hits = 0
    for seed in range(40):
        ci95 = from_loads([observe(on("eagle3", 6), 8, noisy(), 24, seed=seed)]).tau(4).ci95
        assert ci95 is not None
        hits += ci95[0] <= 1 + sum(RATES[:4]) <= ci95[1]
    assert hits >= 34  # 38 expected; fewer than 34 has a probability of 1 % for a true 95 %


def test_a_load_at_a_small_k_that_disagrees_is_believed_there_and_widens_the_interval_elsewhere() -> None:
    deep, small = observe(on("eagle3", 6), 16), observe(on("mtp", 1), 16)
    object.__setattr__(small, "config", on("eagle3", 1))  # a drafter whose first position is another one at K = 1
    joined, alone = from_loads([deep, small]), from_loads([deep])
    assert joined.gap > 0.15  # 0.7 against 0.4, less noise
    assert alone.gap == 0
    assert joined.tau(1).value == pytest.approx(small.tau, rel=0.02)
    assert joined.tau(6).value == pytest.approx(deep.tau, rel=0.02)
    width = [curve.tau(3).ci95[1] - curve.tau(3).ci95[0] for curve in (joined, alone) if curve.tau(3).ci95]
    assert width[0] > width[1] + 0.2


def in_stretches(k: int, seed: int = 3) -> Observation:
    """A load over text with easy and hard stretches, as real text has: an easy token is drafted rightly, a hard one is not."""
    generator = np.random.default_rng(seed)
    easy = np.repeat(generator.random(40_000) < 0.5, generator.geometric(0.25, 40_000))
    at, accepted = 0, []
    while at + k + 1 < len(easy):
        run = next((i for i in range(k) if not easy[at + i]), k)
        accepted.append(run)
        at += run + 1
    rates = tuple(float(np.mean(np.array(accepted) > i)) for i in range(k))
    load = observe(on("eagle3", k), 16)
    object.__setattr__(load, "position_rates", rates)
    object.__setattr__(load, "tau", 1 + sum(rates))
    return load


def test_a_k_of_its_own_loads_has_their_tau_and_the_k_between_are_nearer_to_the_truth() -> None:
    """Steps of a small K begin more often within an easy stretch: the rates of a large K underrate it."""
    loads = {k: in_stretches(k) for k in range(1, 7)}
    alone, joined = from_loads([loads[6]]), from_loads([loads[6], loads[2]])
    assert alone.tau(2).value < 0.97 * loads[2].tau
    assert joined.tau(2).value == pytest.approx(loads[2].tau, rel=0.02)
    assert joined.tau(6).value == pytest.approx(loads[6].tau, rel=0.02)
    for k in (1, 3, 4, 5):
        errors = [abs(curve.tau(k).value - loads[k].tau) for curve in (joined, alone)]
        assert errors[0] < errors[1]


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8), st.dictionaries(st.integers(1, 8), st.floats(-0.05, 0.05)))
def test_rates_at_a_k_never_rise_and_add_up_to_its_tau(rates: list[float], shifts: dict[int, float]) -> None:
    curve = Curve(tuple(sorted(rates, reverse=True)), (100.0,) * len(rates), 1.0, 0.0, 1.0, shifts)
    for k in range(1, len(rates) + 1):
        found = curve.rates_at(k)
        assert all(a >= b for a, b in pairwise(found))
        assert all(0 <= rate <= 1 for rate in found)
        if max(found) < 1:
            assert 1 + sum(found) == pytest.approx(max(1.0, curve.tau(k).value), abs=1e-6)


def test_more_requests_narrow_the_interval() -> None:
    few, many = (from_loads([observe(on("eagle3", 6), 4, count=n)]).tau(6).ci95 for n in (8, 64))
    assert few is not None
    assert many is not None
    assert many[1] - many[0] < 0.5 * (few[1] - few[0])


def test_recorded_outputs_give_the_exact_tau_of_every_k() -> None:
    tokens = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4, 9, 1, 2, 3, 4, 5, 6]
    parts = pool([p for p in ngram_acceptance([Recorded(tokens[:5], tokens[5:])], max_k=4) if (p.min_n, p.max_n) == (1, 3)])
    curve = from_recorded(parts)
    for k in range(1, 5):
        assert curve.tau(k).value == pytest.approx(_walk(tokens, 5, k))
        assert curve.tau(k).ci95 == (curve.tau(k).value, curve.tau(k).value)


def _walk(tokens: list[int], prompt: int, k: int) -> float:
    """Decode steps one after another, with the matcher that the engine's drafter uses."""
    at, steps = prompt + 1, 0
    index = NgramIndex(1, 3)
    index.extend(tokens[:at])
    while at < len(tokens):
        draft, accepted = index.propose(k), 0
        while accepted < len(draft) and at + accepted < len(tokens) and draft[accepted] == tokens[at + accepted]:
            accepted += 1
        ahead = min(accepted + 1, len(tokens) - at)
        index.extend(tokens[at : at + ahead])
        at, steps = at + ahead, steps + 1
    return (len(tokens) - prompt - 1) / steps


@given(st.floats(1.0, 5.9), st.integers(1, 6))
def test_geometric_rates_add_up_to_tau(tau: float, k: int) -> None:
    rates = geometric_rates(min(tau, k + 1), k)
    assert 1 + math.fsum(rates) == pytest.approx(min(tau, k + 1), abs=1e-6)
    assert all(a >= b for a, b in pairwise(rates))


def test_a_server_that_counts_no_positions_still_gives_a_curve() -> None:
    load = observe(on("eagle3", 6), 16)
    object.__setattr__(load, "position_rates", ())
    assert from_loads([load]).tau(6).value == pytest.approx(load.tau, rel=1e-6)


def test_answers_that_came_in_one_chunk_do_not_spoil_the_interval() -> None:
    load = observe(on("eagle3", 6), 16)
    object.__setattr__(load, "ttft_s", np.where(np.arange(64) < 5, load.e2e_s, load.ttft_s))
    ci95 = from_loads([load]).tau(4).ci95
    assert ci95 is not None
    assert all(math.isfinite(end) for end in ci95)
