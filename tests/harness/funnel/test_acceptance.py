import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from backends.matchers import NgramIndex
from backends.simulated.world import World, expected_tau
from harness.funnel.acceptance import MODEL_STRETCH, Curve, from_loads, from_recorded, geometric_rates
from harness.funnel.observation import Observation
from harness.offline import Recorded, ngram_acceptance, pool
from tests.harness.funnel.loads import RATES, WORLD, noisy, observe, on


def stretched(variant: str, stretch: float) -> World:
    return replace(WORLD, drafts={**WORLD.drafts, variant: replace(WORLD.drafts[variant], stretch=stretch)})


def test_one_load_at_the_largest_k_gives_tau_at_every_smaller_k() -> None:
    world = stretched("eagle3", MODEL_STRETCH[0])
    curve = from_loads([observe(on("eagle3", 6), 16, world)])
    for k in range(1, 7):
        measured = observe(on("eagle3", k), 16, world).tau
        assert curve.tau(k).value == pytest.approx(measured, rel=0.03)
        assert curve.tau(k).value == pytest.approx(expected_tau(world.drafts["eagle3"], k), rel=0.05)


@pytest.mark.parametrize("stretch", [0.0, 0.1])
def test_a_load_at_a_smaller_k_shows_how_much_better_small_k_are_than_the_rates_say(stretch: float) -> None:
    world = stretched("eagle3", stretch)
    truth = {k: expected_tau(world.drafts["eagle3"], k) for k in range(1, 7)}
    deep, small = observe(on("eagle3", 6), 16, world), observe(on("eagle3", 2), 16, world)
    alone, joined = from_loads([deep]), from_loads([deep, small])
    assert abs(joined.stretch - stretch) < 0.7 * abs(alone.stretch - stretch)
    assert joined.stretch_sd < alone.stretch_sd
    for k in (1, 2, 3):
        errors = [abs(curve.tau(k).value / truth[k] - 1) for curve in (joined, alone)]
        assert errors[0] < errors[1]
        assert errors[0] < 0.03


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


def test_a_load_at_a_small_k_that_disagrees_widens_the_interval_by_the_gap() -> None:
    deep, small = observe(on("eagle3", 6), 16), observe(on("mtp", 1), 16)
    object.__setattr__(small, "config", on("eagle3", 1))  # a drafter whose first position is another one at K = 1
    joined, alone = from_loads([deep, small]), from_loads([deep])
    assert joined.gap > 0.15  # 0.7 against 0.4, less noise
    assert alone.gap == 0
    width = [curve.tau(1).ci95[1] - curve.tau(1).ci95[0] for curve in (joined, alone) if curve.tau(1).ci95]
    assert width[0] > width[1] + 0.2


def test_lookups_over_text_with_easy_and_hard_stretches_follow_the_law() -> None:
    """An easy token is drafted rightly, a hard one is not: by counting the steps of each K."""
    generator = np.random.default_rng(3)
    easy = np.repeat(generator.random(40_000) < 0.3, generator.geometric(0.25, 40_000))
    loads = {k: _walked(easy, k) for k in range(1, 7)}
    curve = from_loads([loads[6]])
    plain = from_loads([replace(loads[6], config=on("eagle3", 6))])
    for k in range(1, 6):
        assert curve.tau(k).value == pytest.approx(loads[k].tau, rel=0.03)
        assert plain.tau(k).value < loads[k].tau


def _walked(easy: NDArray[np.bool_], k: int) -> Observation:
    at, accepted = 0, []
    while at + k + 1 < len(easy):
        run = next((i for i in range(k) if not easy[at + i]), k)
        accepted.append(run)
        at += run + 1
    rates = tuple(float(np.mean(np.array(accepted) > i)) for i in range(k))
    return replace(observe(on("ngram", k), 16), position_rates=rates, tau=1 + sum(rates))


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8), st.floats(0.0, 0.4))
def test_rates_at_a_k_never_rise_and_add_up_to_its_tau(rates: list[float], stretch: float) -> None:
    curve = Curve(tuple(sorted(rates, reverse=True)), (100.0,) * len(rates), 1.0, 0.0, 1.0, stretch)
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
