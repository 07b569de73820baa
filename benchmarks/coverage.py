"""Do the intervals hold? 1,000 simulated runs of each kind in virtual time, whose truth is known.

python -m benchmarks.coverage [--runs 1000] [coverage|decisions|equal]

coverage: how often the 95 % intervals that the harness gives cover the truth. Closed loop at 8 requests at a time: requests are drawn
from a workload, the truth is one run of 60,000 of them. Open loop: one trace of 300 requests at a share of the engine's capacity,
replayed on servers whose starts differ by 2 % and whose steps by 5 %; the truth is the mean over all replays.

decisions: how often two equal servers are called different, and how often a true 5 % of E2E p50 is found, from interleaved pairs of
runs, every pair on requests of its own. equal: the first of these alone, for many runs.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from backends.simulated.presets import PRESETS
from backends.simulated.virtual import SimulatedRequest, SimulatedRun, simulate
from backends.simulated.world import Noise, World, with_limits
from benchmarks.simulated import at_utilisation, azure_inputs
from harness.replicates import paired_runs, replay_interval, speedup_of_runs, throughput_of_runs, verdict
from harness.statistics import Estimate, closed_throughput, paired_speedup, paired_throughput, quantile_estimate, ratio_estimate

WORLD = with_limits(PRESETS["small"](), prefix_caching=False)
ON = ("draft_model", 4)
CONCURRENCY = 8
LEAD = 3 * CONCURRENCY  # requests before and after the measured ones keep every slot filled
OPEN_NOISE = Noise(step_sigma=0.05, run_sigma=0.02)
REPLAYS = 5


def drawn(rng: np.random.Generator, count: int) -> list[SimulatedRequest]:
    """Requests of one workload: Azure conversation inputs, log-normal outputs, two categories."""
    outputs = np.clip(rng.lognormal(4.0, 0.6, count), 8, 400).astype(int).tolist()
    categories = rng.choice(["code", "chat"], count).tolist()
    inputs = [min(tokens, 2000) for tokens in azure_inputs(rng, count)]
    return [SimulatedRequest(0.0, n, m, c) for n, m, c in zip(inputs, outputs, categories, strict=True)]


def closed(world: World, requests: Sequence[SimulatedRequest], variant: str, k: int, seed: int) -> SimulatedRun:
    return simulate(world, requests, variant=variant, k=k, concurrency=CONCURRENCY, seed=seed)


def measured(run: SimulatedRun, first: int = 0) -> pa.Table:
    """The requests of a closed loop without its lead, as the harness records them; `first` numbers them."""
    rows = slice(LEAD, len(run.e2e_s) - LEAD)
    count = len(run.e2e_s) - 2 * LEAD
    return pa.table(
        {
            "index": np.arange(first, first + count),
            "status": ["completed"] * count,
            "e2e_s": run.e2e_s[rows],
            "output_tokens": run.output_tokens[rows],
            "decode_steps": run.decode_steps[rows],
            "session": pa.array([None] * count, pa.string()),
        }
    )


def numbers(table: pa.Table, name: str) -> np.ndarray:
    return np.asarray(table[name].to_numpy(), dtype=float)


CLOSED: dict[str, Callable[[pa.Table, pa.Table], Estimate]] = {
    "E2E p50": lambda off, on: quantile_estimate(numbers(on, "e2e_s"), 0.5),
    "E2E p95": lambda off, on: quantile_estimate(numbers(on, "e2e_s"), 0.95),
    "throughput": lambda off, on: closed_throughput(numbers(on, "output_tokens"), numbers(on, "e2e_s"), CONCURRENCY),
    "tau": lambda off, on: ratio_estimate(numbers(on, "output_tokens") - 1, numbers(on, "decode_steps")),
    "speed-up of p50": lambda off, on: paired_speedup(off, on, "e2e_s", 0.5),
    "speed-up of p95": lambda off, on: paired_speedup(off, on, "e2e_s", 0.95),
    "throughput on/off": paired_throughput,
}


class Tally:
    """Covered, declined and all, by name."""

    def __init__(self) -> None:
        self.covered: Counter[str] = Counter()
        self.given: Counter[str] = Counter()
        self.width: Counter[str] = Counter()

    def add(self, name: str, found: Estimate, truth: float) -> None:
        if found.ci95 is not None:
            self.given[name] += 1
            self.covered[name] += found.ci95[0] <= truth <= found.ci95[1]
            self.width[name] += (found.ci95[1] - found.ci95[0]) / truth

    def print(self, title: str, names: Sequence[str], runs: int) -> None:
        for name in names:
            n = self.given[name]
            share = f"{self.covered[name] / n:6.1%}, mean width {self.width[name] / n:5.1%}" if n else "declined"
            print(f"{title:36} {name:20} {share}" + (f" (given in {n} of {runs})" if 0 < n < runs else ""), flush=True)


def closed_coverage(runs: int, sizes: Sequence[int]) -> None:
    rng = np.random.default_rng(0)
    whole = drawn(rng, 60_000 + 2 * LEAD)
    off, on = measured(closed(WORLD, whole, "off", 0, 0)), measured(closed(WORLD, whole, *ON, 0))
    truths = {name: estimate_of(off, on).value for name, estimate_of in CLOSED_VALUES.items()}
    for size in sizes:
        tally = Tally()
        for run in range(1, runs + 1):
            requests = drawn(rng, size + 2 * LEAD)
            off, on = measured(closed(WORLD, requests, "off", 0, run)), measured(closed(WORLD, requests, *ON, run))
            for name, estimate in CLOSED.items():
                tally.add(name, estimate(off, on), truths[name])
        tally.print(f"closed loop, {size} requests", list(CLOSED), runs)


def _value(off: np.ndarray, on: np.ndarray, q: float) -> float:
    return float(np.quantile(off, q) / np.quantile(on, q))


CLOSED_VALUES: dict[str, Callable[[pa.Table, pa.Table], Estimate]] = {  # without the resampling
    "E2E p50": lambda off, on: Estimate(float(np.quantile(numbers(on, "e2e_s"), 0.5))),
    "E2E p95": lambda off, on: Estimate(float(np.quantile(numbers(on, "e2e_s"), 0.95))),
    "throughput": lambda off, on: Estimate(CONCURRENCY * numbers(on, "output_tokens").sum() / numbers(on, "e2e_s").sum()),
    "tau": lambda off, on: Estimate((numbers(on, "output_tokens") - 1).sum() / numbers(on, "decode_steps").sum()),
    "speed-up of p50": lambda off, on: Estimate(_value(numbers(off, "e2e_s"), numbers(on, "e2e_s"), 0.5)),
    "speed-up of p95": lambda off, on: Estimate(_value(numbers(off, "e2e_s"), numbers(on, "e2e_s"), 0.95)),
    "throughput on/off": lambda off, on: Estimate(float(numbers(off, "e2e_s").sum() / numbers(on, "e2e_s").sum())),
}


def replay_values(run: SimulatedRun) -> dict[str, float]:
    return {
        "TTFT p50": float(np.quantile(run.ttft_s, 0.5)),
        "TTFT p95": float(np.quantile(run.ttft_s, 0.95)),
        "E2E p50": float(np.quantile(run.e2e_s, 0.5)),
        "E2E p95": float(np.quantile(run.e2e_s, 0.95)),
        "throughput": run.output_tokens_per_s,
        "tau": float((run.output_tokens - 1).sum() / run.decode_steps.sum()),
    }


def open_coverage(runs: int, utilisation: float) -> None:
    world = replace(WORLD, noise=OPEN_NOISE)
    inputs = [min(tokens, 2000) for tokens in azure_inputs(np.random.default_rng(1), 300)]
    trace = at_utilisation(WORLD, "off", 0, utilisation, inputs, 64)
    offs, ons = [], []
    for replay in range(runs * REPLAYS):
        offs.append(replay_values(simulate(world, trace, variant="off", seed=2 * replay)))
        ons.append(replay_values(simulate(world, trace, variant=ON[0], k=ON[1], seed=2 * replay + 1)))
    names = list(ons[0])
    tally = Tally()
    for run in range(runs):
        part = slice(run * REPLAYS, (run + 1) * REPLAYS)
        for name in names:
            values = [found[name] for found in ons]
            tally.add(name, replay_interval(values[part]), float(np.mean(values)))
        for name in ("E2E p50", "E2E p95"):
            off, on = [found[name] for found in offs], [found[name] for found in ons]
            truth = math.exp(float(np.mean(np.log(off) - np.log(on))))
            tally.add(f"speed-up, {name}", paired_runs(off[part], on[part]), truth)
    tally.print(f"open loop at {utilisation:.0%}, {REPLAYS} replays", [*names, "speed-up, E2E p50", "speed-up, E2E p95"], runs)


def repeated_coverage(runs: int, pairs: int, noise: float) -> None:
    """Speed-ups from interleaved runs on servers whose starts differ, all on the same 60 requests."""
    world = replace(WORLD, noise=Noise(run_sigma=noise))
    rng = np.random.default_rng(2)
    whole = drawn(rng, 60_000 + 2 * LEAD)
    off, on = measured(closed(WORLD, whole, "off", 0, 0)), measured(closed(WORLD, whole, *ON, 0))
    tally = Tally()
    names = ("speed-up of p50", "throughput on/off")
    for run in range(runs):
        requests = drawn(rng, 60 + 2 * LEAD)
        seeds = [2 * (run * pairs + pair) for pair in range(pairs)]
        offs = [measured(closed(world, requests, "off", 0, seed)) for seed in seeds]
        ons = [measured(closed(world, requests, *ON, seed + 1)) for seed in seeds]
        tally.add(names[0], speedup_of_runs(offs, ons), CLOSED_VALUES[names[0]](off, on).value)
        tally.add(names[1], throughput_of_runs(offs, ons), CLOSED_VALUES[names[1]](off, on).value)
    tally.print(f"{pairs} pairs of runs, starts differ by {noise:.0%}", names, runs)


def slowed(world: World, factor: float) -> World:
    """Every part of a step takes `factor` times as long."""
    cost = world.target
    times = {
        name: getattr(cost, name) * factor for name in ("fixed_s", "weights_s", "token_s", "prefill_token_s", "context_token_s")
    }
    return replace(world, target=replace(cost, **times))


def decisions(runs: int, noise: float, slow: float, pairs: int, each: int) -> None:
    """Off against off at `slow` times the step time, `pairs` interleaved pairs of runs of `each` requests."""
    baseline = replace(WORLD, noise=Noise(run_sigma=noise))
    candidate = slowed(baseline, 1 / slow)
    rng = np.random.default_rng(3)
    outcomes: Counter[str] = Counter()
    needed: list[int] = []
    for run in range(runs):
        offs, ons = [], []
        for pair in range(pairs):
            requests = drawn(rng, each + 2 * LEAD)
            seed = 2 * (run * pairs + pair)
            offs.append(measured(closed(baseline, requests, "off", 0, seed), 1000 * pair))
            ons.append(measured(closed(candidate, requests, "off", 0, seed + 1), 1000 * pair))
        found = speedup_of_runs(offs, ons)
        outcomes[verdict(found)] += 1
        if verdict(found) == "inconclusive" and found.note:
            needed.append(int(found.note.split()[0]))
    shares = ", ".join(f"{name} {count / runs:.1%}" for name, count in sorted(outcomes.items()))
    asked = f"; pairs asked for, median {sorted(needed)[len(needed) // 2]}" if needed else ""
    print(f"noise {noise:.0%}, true change {slow - 1:.0%}, {pairs} pairs of {each}: {shares}{asked}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("coverage", "decisions", "equal"), nargs="?")
    parser.add_argument("--runs", type=int, default=1000)
    args = parser.parse_args()
    if args.what == "equal":
        decisions(args.runs, 0.02, 1.0, pairs=6, each=50)
        return
    if args.what != "decisions":
        closed_coverage(args.runs, (60, 300))
        for share in (0.3, 0.6, 0.9):
            open_coverage(args.runs, share)
        for pairs in (2, 4):
            repeated_coverage(args.runs, pairs, 0.02)
    if args.what != "coverage":
        for noise in (0.02, 0.11):
            for slow in (1.0, 1.05):
                decisions(args.runs, noise, slow, pairs=6, each=50)  # 300 requests an arm


if __name__ == "__main__":
    main()
