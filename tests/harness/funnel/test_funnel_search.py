"""The whole funnel in simulated worlds of known truth."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from backends.types import ServingConfig
from benchmarks.funnel import run_funnel, truth
from benchmarks.funnel_worlds import make_world
from harness.funnel.acceptance import draft_key
from harness.funnel.observation import Observation
from harness.funnel.prediction import predict
from harness.funnel.search import MAX_REQUESTS, START_SHARE, Funnel, Pruned
from tests.harness.funnel.loads import OFF, WORLD, observe, on, workload

WEIGHTS = {1: 0.2, 4: 0.5, 16: 0.3}


class Bench:
    def __init__(self) -> None:
        self.servers: list[ServingConfig] = []
        self.cells: list[tuple[ServingConfig, int]] = []

    def measure(self, config: ServingConfig, batch: int, stage: str, count: int) -> Mapping[str, Observation] | None:
        if not self.servers or self.servers[-1] != config:
            self.servers.append(config)
        self.cells.append((config, batch))
        return {"t": observe(config, batch, WORLD, min(count, 64), seed=len(self.cells))}


def funnel(bench: Bench, pruned: list[Pruned] | None = None) -> Funnel:
    candidates = [on(variant, k) for variant in ("eagle3", "mtp", "ngram") for k in range(1, 7)]
    offs = [observe(OFF, batch) for batch in WEIGHTS]
    found = Funnel(OFF, candidates, [workload(WEIGHTS)], bench.measure, offs)
    if pruned is not None:
        found.on_prune = pruned.append
    return found


def test_the_best_server_is_found_in_few_starts_and_no_cell_is_measured_twice() -> None:
    bench = Bench()
    search = funnel(bench)
    search.run()
    best = max(
        (on("eagle3", k) for k in range(1, 7)),
        key=lambda config: sum(w / observe(config, b).e2e_s.mean() for b, w in WEIGHTS.items()),
    )
    assert search.incumbent().variant == "eagle3"
    assert abs(search.incumbent().k - best.k) <= 1
    assert len(bench.cells) == len(set(bench.cells))
    assert len(bench.servers) <= 8  # of 18


def test_a_dead_drafter_is_given_up_after_one_load_with_the_evidence() -> None:
    bench, pruned = Bench(), list[Pruned]()
    funnel(bench, pruned).run()
    given_up = [entry for entry in pruned if entry.config.variant == "ngram"]
    assert {entry.config.k for entry in given_up} == set(range(1, 7))
    assert given_up[0].reason.startswith("dead drafter: tau 1.00")
    assert [cell for cell in bench.cells if cell[0].variant == "ngram"] == [(on("ngram", 6), 16)]


def test_predictions_of_cells_that_were_not_measured_hold() -> None:
    bench = Bench()
    search = funnel(bench)
    search.run()
    errors = []
    for (config, batch, _), found in search.first_grid.items():
        if (config, batch) not in bench.cells and config.variant != "ngram":
            true = observe(config, batch)
            throughput = batch * true.output_tokens.sum() / true.e2e_s.sum()
            errors.append(abs(found.output_tokens_per_s / throughput - 1))
            assert found.tau == pytest.approx(true.tau, rel=0.08)
    assert len(errors) > 10
    assert sorted(errors)[len(errors) // 2] < 0.1


def test_batch_sizes_above_the_probe_s_own_are_probed_at_the_largest() -> None:
    bench = Bench()
    search = funnel(bench)
    search.workloads = [workload({48: 0.5, 64: 0.5})]
    search.loads[:] = [observe(OFF, batch) for batch in (48, 64)]
    search.run()
    assert bench.cells[:2] == [(on("eagle3", 6), 64), (on("eagle3", 6), 48)]


def test_a_larger_range_of_k_keeps_the_old_loads_and_probes_only_what_they_do_not_reach() -> None:
    first = Bench()
    small = funnel(first)
    small.candidates = [config for config in small.candidates if config.k <= 3]
    small.run()
    second = Bench()
    large = funnel(second)
    large.loads[:] = small.loads
    large.run()
    assert (on("eagle3", 6), 16) in second.cells
    assert not set(first.cells) & set(second.cells)
    assert large.incumbent().variant == "eagle3"


def test_nothing_is_measured_once_the_budget_is_used_up() -> None:
    bench = Bench()
    search = funnel(bench)
    search.stop = lambda: len(bench.cells) >= 3
    search.run()
    assert len(bench.cells) <= 4  # a probe of two loads is finished


def test_the_more_was_spent_the_more_must_be_expected_of_another_load() -> None:
    """Loads with a drafter that take twenty times off's leave only the probes, and the best at every batch size."""

    class Dear(Bench):
        def measure(self, config: ServingConfig, batch: int, stage: str, count: int) -> Mapping[str, Observation] | None:
            found = super().measure(config, batch, stage, count)
            return {"t": replace(found["t"], cost_s=20 * found["t"].cost_s)} if found else None

    cheap, dear = Bench(), Dear()
    funnel(cheap).run()
    search = funnel(dear)
    search.run()
    assert len(cheap.servers) > len(dear.servers)
    assert set(dear.servers) <= {on("eagle3", 6), on("mtp", 6), on("ngram", 6), search.incumbent()}


def test_a_slow_start_makes_more_requests_cheap() -> None:
    search = funnel(Bench())
    first = search.loads[0]
    search.loads[0] = replace(first, cost_s=first.busy_s + 100.0)
    assert search.requests(1) == int(START_SHARE * 100.0 / (first.busy_s / 64))
    search.loads[0] = replace(first, cost_s=first.busy_s + 1e6)
    assert search.requests(1) == MAX_REQUESTS


def test_prefix_hits_that_a_drafter_loses_make_its_prediction_slower() -> None:
    """With the drafter's loads at half of off's hits the other half of the prompts is computed with it."""

    class Losing(Bench):
        def measure(self, config: ServingConfig, batch: int, stage: str, count: int) -> Mapping[str, Observation] | None:
            found = super().measure(config, batch, stage, count)
            return {"t": replace(found["t"], prefix_hit_rate=0.3 if config.variant == "eagle3" else 0.6)} if found else None

    search = funnel(Losing())
    search.loads = [replace(load, prefix_hit_rate=0.6) for load in search.loads]
    search.workloads = [replace(search.workloads[0], prefix_hit_rate=0.6)]
    search.run()
    search.learn([])  # predictions from all loads
    cost, curve = search.cost, search.curve(draft_key(on("eagle3", 3)), "t")
    kept, lost = (predict(on("eagle3", 3), 4, search.workloads[0], cost, curve, kept_hits=share) for share in (1.0, 0.5))
    assert search.grid[on("eagle3", 3), 4, "t"] == lost
    assert lost.e2e_p50_s > kept.e2e_p50_s
    assert search.grid[on("mtp", 3), 4, "t"] == predict(
        on("mtp", 3), 4, search.workloads[0], cost, search.curve(draft_key(on("mtp", 3)), "t")
    )


def test_a_server_that_fails_is_not_asked_again() -> None:
    class Broken(Bench):
        def measure(self, config: ServingConfig, batch: int, stage: str, count: int) -> Mapping[str, Observation] | None:
            return (
                None
                if config.variant == "mtp" and self.cells.append((config, batch)) is None
                else super().measure(config, batch, stage, count)
            )

    bench = Broken()
    search = funnel(bench)
    search.run()
    assert [cell for cell in bench.cells if cell[0].variant == "mtp"] == [(on("mtp", 6), 16)]
    assert search.incumbent().variant == "eagle3"


@pytest.mark.slow
def test_in_a_world_with_effects_that_no_fit_knows_the_choice_is_near_the_best_for_a_fraction_of_the_grid() -> None:
    bench = make_world(1)
    known = truth(bench)
    choice, lab, _, _ = run_funnel(bench)
    assert known.loss(choice) < 0.02
    assert lab.clock_s < 0.25 * known.grid_s
