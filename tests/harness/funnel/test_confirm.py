import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from backends.simulated.world import Draft, World
from backends.types import ServingConfig
from harness.funnel.confirm import SERVER_SD, Confirmed, Paced, _is_settled, compare, confirm
from harness.funnel.observation import Observation
from harness.funnel.search import Funnel
from harness.statistics import Estimate
from tests.harness.funnel.loads import OFF, WORLD, noisy, observe, on, workload

TRACE = [workload({4: 0.5, 16: 0.5})]


class Bench:
    """Measures in one world, each server start with a luck of its own; `slow` names what is slower at each call."""

    def __init__(self, world: World = WORLD, slow: Mapping[tuple[ServingConfig, str], float] | None = None) -> None:
        self.world, self.slow = world, slow or {}
        self.calls: list[tuple[str, str]] = []

    def measure(self, config: ServingConfig, batch: int, stage: str, count: int) -> Mapping[str, Observation]:
        self.calls.append((config.label(), stage))
        load = observe(config, batch, self.world, count, seed=len(self.calls))
        factor = self.slow.get((config, stage), 1.0)
        return {"t": slower(load, factor)}


def searched(bench: Bench, *candidates: ServingConfig) -> Funnel:
    offs = [bench.measure(OFF, batch, "search", 64)["t"] for batch in (4, 16)]
    funnel = Funnel(OFF, candidates, TRACE, bench.measure, offs)
    funnel.run()
    bench.calls.clear()
    return funnel


def run(funnel: Funnel, *finalists: ServingConfig, rounds: int = 3) -> Confirmed:
    return confirm(funnel, finalists, lambda batch: 48, least_weight=0.05, max_rounds=rounds)


def test_a_clear_winner_is_found_in_one_round_of_server_lifetimes() -> None:
    bench = Bench(noisy())
    best, other = on("eagle3", 3), on("mtp", 6)
    found = run(searched(bench, best, other), best, other)
    assert found.winner == best
    assert found.clear
    assert found.rounds == 1
    assert [label for label, _ in bench.calls] == ["eagle3 K=3"] * 2 + ["mtp K=6"] * 2 + ["off"] * 2
    ci95 = found.speedups[best].ci95
    assert ci95 is not None
    assert ci95[0] > 0


def test_loads_take_turns_where_the_servers_fit_beside_each_other() -> None:
    bench, told = Bench(noisy()), list[str]()
    best = on("eagle3", 3)
    funnel = searched(bench, best)
    asked: list[tuple[int, str]] = []

    def fit(configs: Sequence[ServingConfig], batches: Sequence[int], stage: str) -> bool:
        asked.append((len(configs), stage))
        return True

    found = confirm(
        funnel, [best], lambda batch: 48, least_weight=0.05, side_by_side=fit, after=lambda config: told.append(config.label())
    )
    assert found.winner == best
    assert asked == [(2, "confirm1")]
    assert [label for label, _ in bench.calls] == ["eagle3 K=3", "off", "off", "eagle3 K=3"]
    assert told == ["eagle3 K=3", "off"]


def test_a_tie_goes_to_the_smaller_k() -> None:
    free = Draft({"default": (0.6, 0.4, 0.001)}, step_fixed_s=5e-4)  # a third position costs and gains nothing
    bench = Bench(noisy(replace(WORLD, target=replace(WORLD.target, token_s=1e-7), drafts={"eagle3": free})))
    two, three = on("eagle3", 2), on("eagle3", 3)
    funnel = searched(bench, two, three)
    funnel.objective = "throughput"  # a median jumps from one request to the next
    assert run(funnel, three, two).winner == two


def test_off_wins_where_speculation_gains_nothing() -> None:
    funnel = searched(Bench(noisy()), on("ngram", 6))
    assert run(funnel, on("ngram", 6)).winner == OFF


def test_a_round_that_contradicts_the_search_is_followed_by_another_in_reverse_order() -> None:
    config = on("eagle3", 3)
    bench = Bench(noisy(), slow={(config, "confirm1"): 1.3})
    found = run(searched(bench, config), config, rounds=2)
    assert found.rounds == 2
    assert [label for label, _ in bench.calls] == ["eagle3 K=3"] * 2 + ["off"] * 4 + ["eagle3 K=3"] * 2
    assert run(searched(Bench(noisy()), config), config).rounds == 1


def test_no_further_round_begins_where_it_would_cost_too_much_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.funnel.search.MOST_SERVERS", 3.0)
    config = on("eagle3", 3)
    bench = Bench(noisy(), slow={(config, "confirm1"): 1.3})
    assert run(searched(bench, config), config, rounds=2).rounds == 1


def test_what_the_loads_show_to_be_better_becomes_a_finalist() -> None:
    bench, asked = Bench(noisy()), list[ServingConfig]()
    funnel = searched(bench, on("eagle3", 3), on("eagle3", 6))
    found = confirm(funnel, [on("eagle3", 6)], lambda batch: 48, least_weight=0.05, after=asked.append)
    assert found.winner == on("eagle3", 3)
    assert asked == [on("eagle3", 6), OFF, on("eagle3", 3)]


@pytest.mark.parametrize(
    ("value", "half", "settled"),
    [
        (0.05, 0.03, True),  # apart
        (0.0, 0.015, True),  # equal
        (0.03, 0.035, False),  # apart after one more round, should that find the same
        (0.0, 0.025, False),  # equal then
        (0.01, 0.04, True),  # neither then
        (math.nan, None, False),
    ],
)
def test_another_round_is_worth_it_where_it_could_decide(value: float, half: float | None, settled: bool) -> None:
    found = Estimate(value, None if half is None else (value - half, value + half))
    assert _is_settled(found, 1) == settled


def paced(*loads: Observation, pace: float = 0.0) -> list[Paced]:
    return [Paced(load, pace) for load in loads]


def width(rounds: list[list[Paced]], weights: dict[int, float]) -> float:
    ci95 = compare(rounds, on("eagle3", 3), OFF, [workload(weights)]).ci95
    assert ci95 is not None
    return (ci95[1] - ci95[0]) / (2 * 1.96)


PAIR = [observe(c, 4) for c in (on("eagle3", 3), OFF)]


def test_equal_requests_measured_again_tell_nothing_of_other_requests() -> None:
    once = [paced(*PAIR)]
    narrower = width(once, {4: 1.0}) ** 2 - width(once * 4, {4: 1.0}) ** 2
    servers, steps = 2 * SERVER_SD**2, sum(load.step_noise for load in PAIR)
    assert narrower == pytest.approx(servers - servers * 4 / 7 / 4 + steps - steps / 4)  # of machine and servers alone


def test_equal_requests_at_two_batch_sizes_count_once() -> None:
    again = [replace(load, batch_size=16) for load in PAIR]
    narrower = width([paced(*PAIR)], {4: 1.0}) ** 2 - width([paced(*PAIR, *again)], {4: 0.5, 16: 0.5}) ** 2
    once, both = (sum(load.step_noise for load in part) for part in (PAIR, PAIR + again))
    assert narrower == pytest.approx(once - both / 4)  # of the steps' own noise alone


def slower(load: Observation, factor: float) -> Observation:
    return replace(load, e2e_s=load.e2e_s * factor, ttft_s=load.ttft_s * factor)


def test_rounds_that_disagree_widen_the_interval() -> None:
    other = paced(slower(PAIR[0], 1.1), PAIR[1])
    assert width([paced(*PAIR), other], {4: 1.0}) > 1.2 * width([paced(*PAIR)] * 2, {4: 1.0})


def test_a_round_whose_prompts_took_longer_on_one_side_does_not_count() -> None:
    calm, config = paced(*PAIR), on("eagle3", 3)
    slow = paced(slower(PAIR[0], 1.2), pace=math.log(1.2)) + paced(PAIR[1])
    weights = [workload({4: 1.0})]
    assert compare([slow, calm], config, OFF, weights) == compare([calm], config, OFF, weights)
    assert compare([slow], config, OFF, weights).value == pytest.approx(
        compare([calm], config, OFF, weights).value - math.log(1.2)
    )
    both_slow = [paced(*(slower(load, 1.2) for load in PAIR), pace=math.log(1.2)), calm]  # the ratio is what it was
    assert compare(both_slow, config, OFF, weights).value == pytest.approx(compare([calm], config, OFF, weights).value)


def test_a_finalist_of_the_second_round_is_compared_with_that_rounds_off() -> None:
    late, second = observe(on("mtp", 3), 4), replace(PAIR[1], requests=tuple(range(64, 128)))
    late = replace(late, requests=second.requests)
    found = compare([paced(*PAIR), paced(late, second)], on("mtp", 3), OFF, [workload({4: 1.0})])
    assert found == compare([paced(late, second)], on("mtp", 3), OFF, [workload({4: 1.0})])
    assert math.isfinite(found.value)


def test_the_comparison_weighs_batch_sizes_by_the_trace() -> None:
    loads = [paced(*(observe(c, b) for c in (on("eagle3", 3), OFF) for b in (4, 16)))]
    both = compare(loads, on("eagle3", 3), OFF, [workload({4: 0.25, 16: 0.75})]).value
    each = [compare(loads, on("eagle3", 3), OFF, [workload({b: 1.0})]).value for b in (4, 16)]
    assert both == pytest.approx(0.25 * each[0] + 0.75 * each[1])
