from collections.abc import Mapping

import pytest

from backends.simulated.world import World
from backends.types import ServingConfig
from harness.funnel.confirm import Confirmed, compare, confirm
from harness.funnel.observation import Observation
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
        object.__setattr__(load, "e2e_s", load.e2e_s * factor)
        return {"t": load}


def run(bench: Bench, expected: dict[ServingConfig, tuple[float, float]], rounds: int = 2) -> Confirmed:
    return confirm(expected, OFF, TRACE, bench.measure, lambda batch: 48, least_weight=0.05, max_rounds=rounds)


def test_a_clear_winner_is_found_in_one_round_of_server_lifetimes() -> None:
    bench = Bench(noisy())
    found = run(bench, {on("eagle3", 3): (0.5, 0.3), on("mtp", 6): (0.1, 0.3)})
    assert found.winner == on("eagle3", 3)
    assert found.clear
    assert found.rounds == 1
    assert [label for label, _ in bench.calls] == ["eagle3 K=3"] * 2 + ["mtp K=6"] * 2 + ["off"] * 2
    ci95 = found.speedups[on("eagle3", 3)].ci95
    assert ci95 is not None
    assert ci95[0] > 0


def test_a_tie_goes_to_the_smaller_k() -> None:
    class Same(Bench):
        def measure(self, config: ServingConfig, batch: int, stage: str, count: int) -> Mapping[str, Observation]:
            load = observe(on("eagle3", 3) if config.k else OFF, batch, self.world, count)
            object.__setattr__(load, "config", config)
            return {"t": load}

    found = run(Same(), {on("eagle3", 5): (0.4, 0.3), on("eagle3", 4): (0.4, 0.3)})
    assert found.winner == on("eagle3", 4)
    assert found.clear


def test_off_wins_where_speculation_gains_nothing() -> None:
    found = run(Bench(noisy()), {on("ngram", 6): (0.0, 0.3)})
    assert found.winner == OFF


def test_a_round_that_contradicts_the_search_is_followed_by_another_in_reverse_order() -> None:
    config = on("eagle3", 3)
    bench = Bench(noisy(), slow={(config, "confirm1"): 1.3})
    truth = compare([observe(config, b) for b in (4, 16)] + [observe(OFF, b) for b in (4, 16)], config, OFF, TRACE).value
    found = run(bench, {config: (truth, 0.02)})
    assert found.rounds == 2
    assert [label for label, _ in bench.calls] == ["eagle3 K=3"] * 2 + ["off"] * 4 + ["eagle3 K=3"] * 2
    assert run(Bench(noisy()), {config: (truth, 0.02)}).rounds == 1


def test_the_comparison_weighs_batch_sizes_by_the_trace() -> None:
    loads = [observe(c, b) for c in (on("eagle3", 3), OFF) for b in (4, 16)]
    both = compare(loads, on("eagle3", 3), OFF, [workload({4: 0.25, 16: 0.75})]).value
    each = [compare(loads, on("eagle3", 3), OFF, [workload({b: 1.0})]).value for b in (4, 16)]
    assert both == pytest.approx(0.25 * each[0] + 0.75 * each[1])
