"""The funnel against the full grid on a real engine, both for real: needs a machine that does nothing else for an hour.

python -m benchmarks.funnel_reference --out DIR [--vllm PYTHON | --small]

On the reference engine it is off and n-gram, EAGLE-3 and a draft model (the target's own int4 copy) at K 1-6 and four batch sizes: 76
cells. On vLLM (`PYTHON` is that of its environment) it is off, n-gram and EAGLE-3 at three K and two batch sizes: 14 cells. A cell of the
grid has 64 requests on vLLM and 40 on the reference engine, a load of the funnel 24, of its confirmation 32. The funnel is a run of the
main job; a directory that holds a finished one is read and not measured again. Costs are of closed loads and server starts: the grid's
against the funnel's baseline, search and confirmation. The grid's cells are kept as `DIR/grid.json`. Servers are compared by E2E p50 over
the trace's own batch sizes, which is what the funnel seeks.

A grid measures its cells one after another, on a machine that changes meanwhile. So on the reference engine, whose servers fit beside each
other, off and the variants at one K are under load at once, each with the whole machine for a tenth of a second in turn (`turns`). On
vLLM, whose servers do not, the grid is a run of the main job. The best of many cells is partly the luckiest: in the end the funnel's
choice is compared side by side with the grid's best server and off.

vLLM gets the trace with every request greedy: on a CPU it misjudges the drafts of every batch in which a request is sampled
(github.com/vllm-project/vllm/issues/55005, seen in 0.32.0).
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy import stats

from backends.files import write_whole
from backends.process import Server as Process
from backends.types import ServingConfig
from benchmarks.turns import Part, against, at_once, gain, side_by_side, warm
from harness.evidence import batch_shares, weights_of
from harness.measure import measure, records_table
from harness.replay import Replay
from harness.statistics import column, common_rows, paired_speedup, paired_throughput
from harness.store import measurement_fields
from harness.types import Load
from workloads.load import load_trace
from workloads.types import Request

ROOT = Path(__file__).resolve().parents[1]
OUTPUT_TOKENS = 32
SHORT: tuple[str, ...] = ("--max-output-tokens", str(OUTPUT_TOKENS), "--time-scale", "0.25")
FULL: tuple[str, ...] = ("--variants", "off,ngram,eagle3,draft_model", "--k", "1..6", "--batch-sizes", "1,4,8,16", *SHORT)
FULL += ("--draft", "draft_model=self-int4")
VLLM: tuple[str, ...] = ("--backend", "vllm", "--variants", "off,ngram,eagle3", "--k", "1,3,5", "--batch-sizes", "1,8", *SHORT)
VLLM_ARGS = ("--max-model-len", "2048", "--dtype", "bfloat16")
VLLM += ("--base-args", " ".join(VLLM_ARGS))
SMALL: tuple[str, ...] = ("--variants", "off,ngram", "--k", "1..3", "--batch-sizes", "1,4", "--limit", "40", *SHORT)
TURNS_REQUESTS, ATTEMPTS = 40, 3
COUNTS = {
    "grid": ("--search-requests", "64", "--confirm-requests", "8"),
    "funnel": ("--search-requests", "24", "--confirm-requests", "32"),
}
NEAR, MOST = 0.05, 1
"""Beside the funnel's choice, servers that the grid puts within this of its best, in log, run for the playoff: this many at most."""
PLAYOFF_ROUNDS, PLAYOFF_REQUESTS = 2, 24
LEAST_WEIGHT = 0.01  # of a batch size in the playoff
Key = tuple[str, int, int]  # variant, K, batch size
Server = tuple[str, int]  # variant, K
OFF: Server = ("off", 0)


def run(strategy: str, out: Path, options: tuple[str, ...], trace: str) -> dict[str, Any]:
    if not (out / "result.json").exists():
        command = [sys.executable, str(ROOT / "tune.py"), "--trace", trace, "--strategy", strategy, "--out", str(out)]
        subprocess.run([*command, *options, *COUNTS[strategy]], check=True)
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return result


def greedy(trace: str, path: Path) -> str:
    """`trace` with all requests at temperature 0, as a file at `path`."""
    with path.open("w") as file:
        for line in Path(trace).read_text().splitlines():
            file.write(json.dumps({**json.loads(line), "temperature": 0}) + "\n")
    return str(path)


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration at one batch size, against off at that batch size: beside it, or earlier in the same run."""

    variant: str
    k: int
    batch_size: int
    tau: float
    output_tokens_per_s: float
    throughput: float  # over off's
    speedup: float  # of E2E p50, over paired requests, as a report has it
    log_gain: float  # mean log speed-up of the paired requests
    log_gain_half: float  # of its 95 % interval

    @classmethod
    def of(cls, key: Key, measured: Mapping[str, Any], on: pa.Table, off: pa.Table) -> Cell:
        """From a trial's `metrics` and `speculation`, and its own requests and off's."""
        rates = measured["metrics"]["output_tokens_per_s"], paired_throughput(off, on).value
        plain, fast = (column(table, "e2e_s") for table in common_rows((off, on), "e2e_s"))
        gains = np.log(plain / fast)
        half = float(stats.t.ppf(0.975, len(gains) - 1) * stats.sem(gains))
        return cls(*key, measured["speculation"]["tau"], *rates, paired_speedup(off, on).value, float(gains.mean()), half)


class Grid(NamedTuple):
    cells: list[Cell]
    seconds: float

    @classmethod
    def read(cls, path: Path) -> Grid:
        kept = json.loads(path.read_text())
        return cls([Cell(**cell) for cell in kept["cells"]], kept["seconds"])

    def write(self, path: Path) -> None:
        """One cell a line."""
        rows = ",\n".join(json.dumps({k: _rounded(v) for k, v in asdict(cell).items()}) for cell in self.cells)
        write_whole(path, f'{{"seconds": {self.seconds:.1f}, "cells": [\n{rows}\n]}}\n')


def _rounded(value: str | float) -> str | float:
    """Numbers to five digits."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def trials(result: dict[str, Any], *stages: str) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Measured closed-loop trials of the stages, by cell."""
    for trial in result["trials"]:
        if trial["stage"] in stages and trial["metrics"] and trial["load"]["mode"] == "closed":
            yield (trial["config"]["variant"], trial["config"]["k"], trial["load"]["concurrency"]), trial


def seconds(result: dict[str, Any], *stages: str) -> float:
    """Of closed-loop loads, server starts included: both strategies replay the trace's own arrivals besides."""
    return sum(t["cost"]["seconds"] for t in result["trials"] if t["stage"] in stages and t["load"]["mode"] == "closed")


def requests_of(folder: Path, trial: Mapping[str, Any]) -> pa.Table:
    """What became of the requests of a trial of the run in `folder`."""
    return pq.read_table(folder / "trials" / f"{trial['number']:04d}" / "requests.parquet")


def trace_weights(funnel: dict[str, Any], folder: Path) -> dict[int, float]:
    """What the batch sizes count, as the funnel in `folder` weighed them: by off's replay of the trace's own arrivals."""
    replay = next(t for t in funnel["trials"] if t["stage"] == "baseline" and t["load"]["mode"] == "trace")
    return weights_of(
        batch_shares(requests_of(folder, replay)), sorted({batch for (_, _, batch), _ in trials(funnel, "baseline")})
    )


def one_by_one(folder: Path, options: tuple[str, ...], trace: str) -> Grid:
    """The grid as a run of the main job."""
    result = run("grid", folder, options, trace)
    measured = dict(trials(result, "baseline", "search"))
    tables = {key: requests_of(folder, trial) for key, trial in measured.items()}
    cells = [Cell.of(key, measured[key], tables[key], tables["off", 0, key[2]]) for key in measured if key[1]]
    return Grid(cells, seconds(result, "baseline", "search"))


def in_turns(kept: Path, configs: Mapping[Server, ServingConfig], batches: Sequence[int], trace: str) -> Grid:
    """Off and each variant at one K under load at once, one K after the other. Goes on from what is in `kept`.

    The seconds are each server's own: what the cells would take alone, with off measured once.
    """
    known = Grid.read(kept) if kept.exists() else Grid([], 0.0)
    ks = sorted({k for _, k in configs if k})
    requests = sample(trace, TURNS_REQUESTS)
    parts = [Part(Load("closed", "sample", concurrency=batch), requests) for batch in batches]
    for k in ks:
        if any(cell.k == k for cell in known.cells):
            continue
        sides = {variant: config for (variant, its), config in configs.items() if its in (0, k)}
        cells, spent = beside_off(sides, k, parts)
        known = Grid([*known.cells, *cells], known.seconds + sum(spent.values()) - spent["off"] * (1 - 1 / len(ks)))
        known.write(kept)
    return known


def beside_off(sides: Mapping[str, ServingConfig], k: int, parts: Sequence[Part]) -> tuple[list[Cell], dict[str, float]]:
    """The cells of one K, and what each server took of its own time, its start included; both by `sides`, off and variants."""
    cells = []
    with side_by_side(sides, command=None, base_args=()) as servers:
        spent = {name: server.endpoint.startup_s or 0.0 for name, server in servers.items()}
        warm(servers, parts[0])
        for part in parts:
            runs = dict(zip(servers, complete(list(servers.values()), part), strict=True))
            tables = {name: records_table(found.records) for name, found in runs.items()}
            for name, found in runs.items():
                spent[name] += found.wall_s
                if name == "off":
                    continue
                measured, batch = measurement_fields(measure(found, part.load)), part.load.concurrency or 0
                cells.append(Cell.of((name, k, batch), measured, tables[name], tables["off"]))
                print(f"{name} K={k} at {batch}: {cells[-1].speedup:.3f}x, tau {cells[-1].tau:.2f}", flush=True)
    return cells, spent


def complete(servers: Sequence[Process], part: Part) -> list[Replay]:
    """The part on all servers, again where the counts of one could not be read."""
    for _ in range(ATTEMPTS):
        runs = at_once(servers, part)
        lost = [run.invalid for run in runs if run.counters is None or run.invalid]
        if not lost:
            return runs
        print(f"once more: {lost}", flush=True)
    raise SystemExit(f"{ATTEMPTS} loads in a row could not be used")


def configs_of(funnel: dict[str, Any]) -> dict[Server, ServingConfig]:
    """All servers of the grid: off, and the funnel's drafters at every K."""
    drafters = [ServingConfig.from_dict(row["config"]) for row in funnel["funnel"][0]["acceptance"]]
    ks = sorted({row["config"]["k"] for row in funnel["predictions"]} - {0})
    return {OFF: drafters[0].off(), **{(drafter.variant, k): replace(drafter, k=k) for k in ks for drafter in drafters}}


def gains(cells: Sequence[Cell], weights: Mapping[int, float]) -> dict[Server, float]:
    """Log speed-up of E2E p50 over the trace's batch sizes for each server; off has 0."""
    found: dict[Server, float] = {OFF: 0.0}
    for cell in cells:
        at = cell.variant, cell.k
        found[at] = found.get(at, 0.0) + weights[cell.batch_size] * math.log(cell.speedup)
    return found


def sample(trace: str, count: int) -> list[Request]:
    """`count` requests of the trace, evenly spaced, each of `OUTPUT_TOKENS`."""
    everything = load_trace(trace).requests()
    places = np.linspace(0, len(everything) - 1, min(count, len(everything))).round().astype(int)
    return [replace(everything[place], index=i, max_tokens=OUTPUT_TOKENS) for i, place in enumerate(places)]


def playoff(
    configs: Mapping[Server, ServingConfig],
    known: Mapping[Server, float],
    chosen: Server,
    weights: Mapping[int, float],
    trace: str,
    engine: tuple[str, ...] | None,
    base_args: tuple[str, ...],
) -> None:
    """The funnel's choice against the best of `known`, the grid's, side by side, by the same weights; printed."""
    best = sorted(known, key=lambda server: -known[server])
    rivals = [server for server in best if known[best[0]] - known[server] <= NEAR and server != chosen][:MOST]
    requests = sample(trace, PLAYOFF_REQUESTS)
    parts = [
        Part(Load("closed", "sample", concurrency=batch), requests, weight)
        for batch, weight in weights.items()
        if weight > LEAST_WEIGHT
    ]
    sides = {f"{variant} K={k}": configs[variant, k] for variant, k in dict.fromkeys((chosen, *rivals, OFF))}
    mine, *others = sides
    with side_by_side(sides, command=engine, base_args=base_args) as servers:
        pairs = against(mine, servers, parts, PLAYOFF_ROUNDS)
    for other in others:
        value, low, high = gain(pairs[other], parts)
        print(f"{mine} against {other}: {value:.3f}x as fast (95 % interval {low:.3f}-{high:.3f})")


def predictions(funnel: dict[str, Any], cells: Sequence[Cell]) -> dict[str, float]:
    """What the funnel predicted after its probes against what the grid measured, in cells that the funnel did not measure.

    Output tokens/s also over off's: the two runs are an hour apart, and a shared machine is not as fast in both.
    """
    measured = {(cell.variant, cell.k, cell.batch_size): cell for cell in cells}
    offs = {row["load"]["concurrency"]: row for row in funnel["predictions"] if row["config"]["k"] == 0}
    tau, rate, relative, signs = [], [], [], []
    for row in funnel["predictions"]:
        batch = row["load"]["concurrency"]
        cell = measured.get((row["config"]["variant"], row["config"]["k"], batch))
        if cell is None or row["measured_in_trial"] is not None:
            continue
        plain = offs[batch]
        tau.append(abs(row["tau"] / cell.tau - 1))
        rate.append(abs(row["output_tokens_per_s"] / cell.output_tokens_per_s - 1))
        relative.append(abs(row["output_tokens_per_s"] / plain["output_tokens_per_s"] / cell.throughput - 1))
        if abs(cell.log_gain) > cell.log_gain_half:  # of a mean, as tokens/s are
            signs.append((row["output_tokens_per_s"] > plain["output_tokens_per_s"]) == (cell.log_gain > 0))
    return {
        "cells": len(tau),
        "tau_median_error": float(np.median(tau)),
        "tokens_per_s_median_error": float(np.median(rate)),
        "tokens_per_s_over_off_median_error": float(np.median(relative)),
        "cells_with_a_sign": len(signs),
        "signs_right": float(np.mean(signs)) if signs else math.nan,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trace", default=str(ROOT / "workloads" / "samples" / "demo.jsonl"))
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--vllm", metavar="PYTHON", help="on vLLM, which this interpreter has")
    which.add_argument(
        "--small", action="store_true", help="off and n-gram at three K and two batch sizes: a trial of the command"
    )
    args = parser.parse_args()
    options = (*VLLM, "--engine", f"vllm={args.vllm}") if args.vllm else SMALL if args.small else FULL
    args.out.mkdir(parents=True, exist_ok=True)
    trace = greedy(args.trace, args.out / "greedy.jsonl") if args.vllm else args.trace
    funnel = run("funnel", args.out / "funnel", options, trace)
    weights = trace_weights(funnel, args.out / "funnel")
    print("weights of the batch sizes:", {batch: round(weight, 3) for batch, weight in weights.items()})
    configs = configs_of(funnel)
    if args.vllm:
        grid = one_by_one(args.out / "grid", options, trace)
        grid.write(args.out / "grid.json")
    else:
        grid = in_turns(args.out / "grid.json", configs, sorted(weights), trace)
    known = gains(grid.cells, weights)
    best = max(known, key=lambda server: known[server])
    winner = funnel["funnel"][0]["confirmation"]["winner"]
    chosen = (winner["variant"], winner["k"])
    search_s = seconds(funnel, "baseline", "search")
    cost = search_s + seconds(funnel, "confirm", "confirm2", "confirm3", "baseline_last")
    print(f"grid: {len(known)} servers, best {best[0]} K={best[1]} ({math.exp(known[best]):.3f}x), {grid.seconds:.0f} s")
    print(f"funnel: {chosen[0]} K={chosen[1]}, {math.expm1(known[best] - known[chosen]):.2%} slower than the grid's best")
    print(f"funnel's time: {cost / grid.seconds:.1%} of the grid's, {search_s / grid.seconds:.1%} before the confirmation")
    for name, value in predictions(funnel, grid.cells).items():
        print(f"{name}: {value:.4g}")
    playoff(configs, known, chosen, weights, trace, (args.vllm,) if args.vllm else None, VLLM_ARGS if args.vllm else ())


if __name__ == "__main__":
    main()
