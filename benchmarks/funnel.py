"""The funnel against TPE and random search at equal cost, in simulated worlds of known truth.

python -m benchmarks.funnel --worlds 200 [--workers 2] [--out FILE.jsonl]

The funnel is `harness.funnel` as the main job runs it; only the measuring is virtual. A world's answer is the server (variant and K, or
off) with the best mean log speed-up of E2E p50 over the trace's own batch sizes. Cost is engine time: server starts and loads. The grid
starts every server once and sends every batch size 80 requests, or as many as the batch size.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import optuna

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from backends.simulated.virtual import SimulatedRun, simulate
from backends.types import ServingConfig
from benchmarks.funnel_worlds import BATCH_SIZES, MAX_K, BenchWorld, make_world
from harness.evidence import weights_of
from harness.funnel.confirm import confirm
from harness.funnel.observation import Observation, Workload
from harness.funnel.search import LEAST_WEIGHT, Funnel, requests_of
from harness.funnel.virtual_load import VirtualLoad, closed_loop
from harness.search import cells_of, open_study, search
from harness.space import Space

OFF = ServingConfig(backend="simulated", model="world", max_num_seqs=256)
GRID_REQUESTS = 80
OFF_REQUESTS, CONFIRM_REQUESTS = 24, 48
TRACE = "trace"


def candidates(bench: BenchWorld) -> tuple[ServingConfig, ...]:
    return tuple(
        ServingConfig.from_dict({**OFF.to_dict(), "variant": variant, "k": k, "draft": variant})
        for variant in bench.world.drafts
        for k in range(1, MAX_K + 1)
    )


@dataclass(slots=True)
class VirtualLab:
    """Measures in one world and adds up what it costs. The clock is that of the search: the machine's phases happen on it."""

    bench: BenchWorld
    clock_s: float = 0.0
    starts: int = 0
    running: ServingConfig | None = None
    order: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.order = np.random.default_rng(self.bench.seed).permutation(len(self.bench.requests))

    def measure(self, config: ServingConfig, batch: int, stage: str, count: int) -> Mapping[str, Observation]:
        """`count` requests: of one half of the trace in the search, of the other in confirmation, in an order of each batch size."""
        began = self.clock_s
        if config != self.running:
            self.clock_s += self.bench.world.startup_s
            self.starts += 1
            self.running = config
        half = len(self.order) // 2
        part = self.order[half:] if stage.startswith("confirm") else self.order[:half]
        part = np.random.default_rng([self.bench.seed, batch]).permutation(part)
        other = count * (int(stage.removeprefix("confirm")) - 1) if stage.startswith("confirm") else 0  # of each round
        chosen = np.sort(np.roll(part, -other)[:count])
        requests = self.bench.requests_for(config.variant)
        world = self.bench.with_draft(self.bench.at(self.clock_s), config.variant)
        load = [requests[i] for i in chosen]
        seed = self.bench.seed + 1000 * self.starts
        run = closed_loop(world, load, variant=config.variant, k=config.k, concurrency=batch, seed=seed)
        self.clock_s += run.wall_s
        return {
            TRACE: observation(run, config, batch, chosen, [requests[i].input_tokens for i in chosen], self.clock_s - began)
        }

    def open_loop(self) -> dict[int, float]:
        """Shares of busy time by requests in flight at the trace's own arrivals, with off."""
        if self.running != OFF:
            self.clock_s += self.bench.world.startup_s
            self.starts += 1
            self.running = OFF
        run = simulate(self.bench.at(self.clock_s), self.bench.requests, seed=self.bench.seed)
        self.clock_s += float(run.last_token_s.max())
        return shares(run)


def observation(
    run: VirtualLoad, config: ServingConfig, batch: int, chosen: np.ndarray, inputs: list[int], cost_s: float
) -> Observation:
    counters = run.counters
    steps = counters.decode_steps or 1
    return Observation(
        config=config,
        batch_size=batch,
        workload=TRACE,
        requests=tuple(int(i) for i in chosen),
        input_tokens=np.array(inputs, dtype=float),
        output_tokens=run.output_tokens,
        ttft_s=run.ttft_s,
        e2e_s=run.e2e_s,
        tau=counters.tau or 1.0,
        position_rates=tuple(n / steps for n in counters.accepted_per_position or ()),
        drafted_share=(counters.drafted_steps or 0) / steps,
        prefix_hit_rate=(counters.prefix_hit_tokens or 0) / max(counters.prefix_query_tokens or 0, 1),
        cost_s=cost_s,
    )


def shares(run: SimulatedRun) -> dict[int, float]:
    times = np.concatenate([run.sent_s, run.last_token_s])
    change = np.concatenate([np.ones(len(run.sent_s)), -np.ones(len(run.sent_s))])
    order = np.lexsort((change, times))
    level, widths = np.cumsum(change[order])[:-1].astype(int), np.diff(times[order])
    return {int(b): float(widths[level == b].sum() / widths[level > 0].sum()) for b in np.unique(level) if b > 0}


@dataclass(frozen=True, slots=True)
class Truth:
    weights: Mapping[int, float]
    scores: Mapping[ServingConfig, float]
    grid_s: float

    def loss(self, choice: ServingConfig) -> float:
        """How much slower than the best, relative."""
        return float(np.expm1(max(self.scores.values()) - self.scores[choice]))


def truth(bench: BenchWorld) -> Truth:
    """Every cell of the quiet world in expectation, with all requests of the trace, and what the grid takes."""
    world = bench.quiet()
    weights = weights_of(shares(simulate(world, bench.requests)), BATCH_SIZES)
    p50: dict[tuple[ServingConfig, int], float] = {}
    grid_s = 0.0
    for config in (OFF, *candidates(bench)):
        requests = bench.requests_for(config.variant)
        grid_s += world.startup_s
        for batch in BATCH_SIZES:
            here = bench.with_draft(world, config.variant)
            run = closed_loop(here, requests, variant=config.variant, k=config.k, concurrency=batch, luck=False)
            p50[config, batch] = float(np.median(run.e2e_s))
            leads = 0.5 * batch + (batch - 1)  # shortened to half on average before, whole after
            share = (requests_of(batch, GRID_REQUESTS) + leads) / (len(requests) + leads)
            grid_s += run.wall_s * share
    scores = {
        config: sum(share * np.log(p50[OFF, b] / p50[config, b]) for b, share in weights.items())
        for config in (OFF, *candidates(bench))
    }
    return Truth(weights, scores, grid_s)


def estimand(bench: BenchWorld, choice: ServingConfig) -> float:
    """What a confirmed interval is an interval of: the mean log speed-up over all requests of the trace, at the batch sizes that were
    confirmed."""
    world = bench.quiet()
    total = value = 0.0
    for batch, share in weights_of(shares(simulate(world, bench.requests)), BATCH_SIZES).items():
        if share >= LEAST_WEIGHT:
            off, *ons = (
                closed_loop(
                    bench.with_draft(world, config.variant),
                    bench.requests_for(config.variant),
                    variant=config.variant,
                    k=config.k,
                    concurrency=batch,
                    seed=seed,
                ).e2e_s
                for config, seed in [(OFF, 0), *((choice, seed) for seed in range(4))]
            )
            value += share * float(np.mean([np.log(off / on) for on in ons]))
            total += share
    return value / total


def run_funnel(bench: BenchWorld) -> tuple[ServingConfig, VirtualLab, Funnel, dict[str, Any]]:
    lab = VirtualLab(bench)
    offs = [lab.measure(OFF, batch, "search", requests_of(batch, OFF_REQUESTS))[TRACE] for batch in BATCH_SIZES]
    weights = weights_of(lab.open_loop(), BATCH_SIZES)
    workload = Workload(
        TRACE,
        tuple(request.input_tokens for request in bench.requests),
        tuple(request.output_tokens for request in bench.requests),
        float(np.mean([o.prefix_hit_rate for o in offs])),
        weights,
    )
    capacity = bench.world.limits.kv_capacity_tokens
    funnel = Funnel(OFF, candidates(bench), [workload], lab.measure, list(offs), kv_cache_tokens=capacity, every_batch=False)
    cost = {"off": lab.clock_s}
    funnel.run()
    cost["search"] = lab.clock_s - sum(cost.values())
    finalists = funnel.finalists
    confirmed = confirm(
        funnel,
        finalists,
        lambda b: funnel.requests(b, CONFIRM_REQUESTS),
        least_weight=LEAST_WEIGHT,
    )
    cost["confirm"] = lab.clock_s - sum(cost.values())
    found = confirmed.speedups.get(confirmed.winner)
    details = {
        "cost_by_stage": cost,
        "finalists": [c.label() for c in finalists],
        "rounds": confirmed.rounds,
        "confirmed_interval": found.ci95 if found else None,
    }
    return confirmed.winner, lab, funnel, details


def run_rival(bench: BenchWorld, strategy: str, cost_s: float) -> ServingConfig:
    """Another search with the same engine time, the grid's loads, and the same reuse of servers; its best measured server."""
    lab = VirtualLab(bench)
    weights = weights_of(lab.open_loop(), BATCH_SIZES)
    p50 = {(OFF, b): _p50(lab, OFF, b) for b in BATCH_SIZES}

    def value(cell: Any) -> tuple[float, ...] | None:
        if lab.clock_s >= cost_s:
            return None
        p50[cell.config, cell.batch_size] = _p50(lab, cell.config, cell.batch_size)
        return (float(np.log(p50[cell.config, cell.batch_size] / p50[OFF, cell.batch_size])),)

    space = Space((OFF,), candidates(bench), (), BATCH_SIZES)
    study = open_study(cells_of(space), optuna.storages.InMemoryStorage(), strategy=strategy, seed=bench.seed, objectives=1)
    search(space, value, study, strategy=strategy, stop=lambda: lab.clock_s >= cost_s)

    def score(config: ServingConfig) -> float:
        known = {b: share for b, share in weights.items() if (config, b) in p50 and share > 0}
        if sum(known.values()) < 0.5:  # too little of the trace's load was measured to choose it
            return -np.inf
        return sum(share * np.log(p50[OFF, b] / p50[config, b]) for b, share in known.items()) / sum(known.values())

    return max({config for config, _ in p50}, key=score)


def _p50(lab: VirtualLab, config: ServingConfig, batch: int) -> float:
    return float(np.median(lab.measure(config, batch, "search", requests_of(batch, GRID_REQUESTS))[TRACE].e2e_s))


def one_world(seed: int) -> dict[str, Any]:
    began = time.process_time()
    bench = make_world(seed)
    known = truth(bench)
    choice, lab, funnel, details = run_funnel(bench)
    best = max(known.scores, key=lambda config: known.scores[config])
    errors = [
        abs(np.expm1(funnel.scores.of(config)[0] - known.scores[config])) for config in funnel.scores.configs if config != OFF
    ]
    return {
        "seed": seed,
        "family": bench.family,
        "cells": len(known.scores) * len(BATCH_SIZES),
        "best": best.label(),
        "best_speedup": float(np.exp(known.scores[best])),
        "choice": choice.label(),
        "loss": known.loss(choice),
        "search_loss": known.loss(funnel.incumbent()),
        "cost": lab.clock_s / known.grid_s,
        "starts": lab.starts,
        "prediction_error": float(np.median(errors)) if errors else None,
        "tpe_loss": known.loss(run_rival(bench, "tpe", lab.clock_s)),
        "random_loss": known.loss(run_rival(bench, "random", lab.clock_s)),
        "grid_s": known.grid_s,
        "estimand": estimand(bench, choice) if details["confirmed_interval"] else None,
        "cpu_s": time.process_time() - began,
        **details,
    }


def table(rows: list[dict[str, Any]]) -> str:
    def line(name: str, losses: list[float], cost: str) -> str:
        within = np.mean([loss <= 0.02 for loss in losses])
        p95 = np.quantile(losses, 0.95)
        return f"| {name} | {within:.1%} | {np.median(losses):.2%} | {p95:.1%} | {max(losses):.1%} | {cost} |"

    costs = [row["cost"] for row in rows]
    intervals = [(row["estimand"], *row["confirmed_interval"]) for row in rows if row["confirmed_interval"]]
    held = [low <= value <= high for value, low, high in intervals]
    cost = f"median {np.median(costs):.1%}, largest {max(costs):.1%}"
    return "\n".join(
        [
            "| strategy | within 2 % of the best | median loss | p95 loss | largest loss | cost, share of the grid's |",
            "|---|---|---|---|---|---|",
            line("funnel", [row["loss"] for row in rows], cost),
            line("TPE", [row["tpe_loss"] for row in rows], "the funnel's"),
            line("random", [row["random_loss"] for row in rows], "the funnel's"),
            "",
            f"Confirmed 95 % intervals that hold what they estimate: {np.mean(held):.1%} of {len(held)}.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="seed of the first world")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a line of JSON for each world; worlds that it holds are not run again")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out and args.out.exists() else []
    known = {row["seed"] for row in rows}
    seeds = [seed for seed in range(args.first, args.first + args.worlds) if seed not in known]
    with ProcessPoolExecutor(args.workers) as pool:
        for row in pool.map(one_world, seeds):
            rows.append(row)
            if args.out:
                with open(args.out, "a") as file:
                    file.write(json.dumps(row) + "\n")
            print(
                f"world {row['seed']} {row['family']}: best {row['best']} {row['best_speedup']:.2f}x, chose {row['choice']}, "
                f"loss {row['loss']:.2%}, cost {row['cost']:.1%}, {row['starts']} starts",
                file=sys.stderr,
                flush=True,
            )
    print(f"{len(rows)} worlds of {rows[0]['cells']} cells\n\n{table(rows)}")


if __name__ == "__main__":
    main()
