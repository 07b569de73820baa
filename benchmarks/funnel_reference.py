"""The funnel against the full grid on a real engine, both for real: needs a machine that does nothing else for an hour.

python -m benchmarks.funnel_reference --out DIR [--vllm PYTHON | --small]

On the reference engine it is off and n-gram, EAGLE-3 and a draft model (the target's own int4 copy) at K 1-6 and four batch sizes: 76
cells. On vLLM (`PYTHON` is that of its environment) it is off, n-gram and EAGLE-3 at three K and two batch sizes: 14 cells. Each strategy
is a run of the main job of its own; a directory that holds a finished run is read and not measured again. A cell of the grid has 64
requests, a load of the funnel 24, of its confirmation 32: about the proportions of `benchmarks.funnel`. Costs are those of the trials,
server starts included: the grid's baseline and search against the funnel's baseline, search and confirmation. The grid's cells are kept
as `DIR/grid.json`. Servers are compared by E2E p50 over the trace's own batch sizes, which is what the funnel seeks.

A grid measures its cells one after another, on a machine that changes meanwhile, and the best of many cells is partly the luckiest. So in
the end the funnel's choice is compared side by side with the grid's best servers and off.

vLLM gets the trace with every request greedy: on a CPU it misjudges the drafts of every batch in which a request is sampled
(github.com/vllm-project/vllm/issues/55005, seen in 0.32.0).
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from backends.types import ServingConfig
from benchmarks.turns import Part, against, gain, side_by_side
from harness.evidence import batch_shares, weights_of
from harness.types import Load
from workloads.load import load_trace

ROOT = Path(__file__).resolve().parents[1]
OUTPUT_TOKENS = 32
SHORT: tuple[str, ...] = ("--max-output-tokens", str(OUTPUT_TOKENS), "--time-scale", "0.25")
FULL: tuple[str, ...] = ("--variants", "off,ngram,eagle3,draft_model", "--k", "1..6", "--batch-sizes", "1,4,8,16", *SHORT)
FULL += ("--draft", "draft_model=self-int4")
VLLM: tuple[str, ...] = ("--backend", "vllm", "--variants", "off,ngram,eagle3", "--k", "1,3,5", "--batch-sizes", "1,8", *SHORT)
VLLM_ARGS = ("--max-model-len", "2048", "--dtype", "bfloat16")
VLLM += ("--base-args", " ".join(VLLM_ARGS))
SMALL = ("--variants", "off,ngram", "--k", "1..3", "--batch-sizes", "1,4", "--limit", "40", *SHORT)
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


def trials(result: dict[str, Any], *stages: str) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Measured closed-loop trials of the stages, by cell."""
    for trial in result["trials"]:
        if trial["stage"] in stages and trial["metrics"] and trial["load"]["mode"] == "closed":
            yield (trial["config"]["variant"], trial["config"]["k"], trial["load"]["concurrency"]), trial


def seconds(result: dict[str, Any], *stages: str) -> float:
    """Of closed-loop loads, server starts included: both strategies replay the trace's own arrivals besides."""
    return sum(t["cost"]["seconds"] for t in result["trials"] if t["stage"] in stages and t["load"]["mode"] == "closed")


def trace_weights(funnel: dict[str, Any], folder: Path) -> dict[int, float]:
    """What the batch sizes count, as the funnel in `folder` weighed them: by off's replay of the trace's own arrivals."""
    replay = next(t for t in funnel["trials"] if t["stage"] == "baseline" and t["load"]["mode"] == "trace")
    records = pq.read_table(folder / "trials" / f"{replay['number']:04d}" / "requests.parquet")
    return weights_of(batch_shares(records), sorted({batch for (_, _, batch), _ in trials(funnel, "baseline")}))


def gains(grid: dict[str, Any], weights: dict[int, float]) -> dict[Server, float]:
    """Log speed-up of E2E p50 over the trace's batch sizes for each server that the grid measured; off has 0."""
    p50 = {key: trial["metrics"]["e2e_s"]["p50"] for key, trial in trials(grid, "baseline", "search")}
    servers = {(variant, k) for variant, k, _ in p50}
    return {
        (variant, k): sum(w * math.log(p50["off", 0, b] / p50[variant, k, b]) for b, w in weights.items())
        for variant, k in servers
        if all((variant, k, b) in p50 for b in weights)
    }


def playoff(
    grid: dict[str, Any],
    known: dict[Server, float],
    chosen: Server,
    weights: dict[int, float],
    trace: str,
    engine: tuple[str, ...] | None,
    base_args: tuple[str, ...],
) -> None:
    """The funnel's choice against the best of `known`, the grid's, side by side, by the same weights; printed."""
    best = sorted(known, key=lambda server: -known[server])
    rivals = [server for server in best if known[best[0]] - known[server] <= NEAR and server != chosen][:MOST]
    by_server = {key[:2]: ServingConfig.from_dict(trial["config"]) for key, trial in trials(grid, "baseline", "search")}
    everything = load_trace(trace).requests()
    some = everything[:: max(len(everything) // PLAYOFF_REQUESTS, 1)]
    requests = [replace(request, index=i, max_tokens=OUTPUT_TOKENS) for i, request in enumerate(some)]
    parts = [
        Part(Load("closed", "sample", concurrency=batch), requests, weight)
        for batch, weight in weights.items()
        if weight > LEAST_WEIGHT
    ]
    configs = {f"{variant} K={k}": by_server[variant, k] for variant, k in dict.fromkeys((chosen, *rivals, OFF))}
    mine, *others = configs
    with side_by_side(configs, command=engine, base_args=base_args) as servers:
        pairs = against(mine, servers, parts, PLAYOFF_ROUNDS)
    for other in others:
        value, low, high = gain(pairs[other], parts)
        print(f"{mine} against {other}: {value:.3f}x as fast (95 % interval {low:.3f}-{high:.3f})")


def cells(grid: dict[str, Any]) -> list[dict[str, Any]]:
    """What is kept of a grid: each cell's figures."""
    return [
        {
            "variant": variant,
            "k": k,
            "batch_size": batch,
            "e2e_p50_s": round(trial["metrics"]["e2e_s"]["p50"], 4),
            "output_tokens_per_s": round(trial["metrics"]["output_tokens_per_s"], 2),
            "tau": trial["speculation"]["tau"] and round(trial["speculation"]["tau"], 4),
            "speedup": trial["speedup"],
            "cost_s": round(trial["cost"]["seconds"], 2),
        }
        for (variant, k, batch), trial in trials(grid, "baseline", "search")
    ]


def log_gain(folder: Path, on: dict[str, Any], off: dict[str, Any]) -> tuple[float, float]:
    """Mean log speed-up over the requests that both trials of the run in `folder` served, and half of its 95 % interval."""
    sides = [
        pq.read_table(folder / "trials" / f"{t['number']:04d}" / "requests.parquet", columns=["index", "e2e_s"])
        for t in (on, off)
    ]
    fast, plain = (dict(zip(side["index"].to_pylist(), side["e2e_s"].to_pylist(), strict=True)) for side in sides)
    gains = np.array([math.log(plain[i] / fast[i]) for i in fast if fast[i] and plain.get(i)])
    return float(gains.mean()), 1.96 * float(gains.std(ddof=1)) / math.sqrt(len(gains))


def predictions(funnel: dict[str, Any], grid: dict[str, Any], grid_folder: Path) -> dict[str, float]:
    """What the funnel predicted after its probes against what the grid measured, in cells that the funnel did not measure.

    Output tokens/s also over off's: the two runs are an hour apart, and a shared machine is not as fast in both.
    """
    measured = dict(trials(grid, "baseline", "search"))
    offs = {row["load"]["concurrency"]: row for row in funnel["predictions"] if row["config"]["k"] == 0}
    tau, rate, relative, signs = [], [], [], []
    for row in funnel["predictions"]:
        batch = row["load"]["concurrency"]
        trial = measured.get((row["config"]["variant"], row["config"]["k"], batch))
        if trial is None or row["config"]["k"] == 0 or row["measured_in_trial"] is not None:
            continue
        off, plain = measured["off", 0, batch], offs[batch]
        error = row["output_tokens_per_s"] / trial["metrics"]["output_tokens_per_s"]
        tau.append(abs(row["tau"] / trial["speculation"]["tau"] - 1))
        rate.append(abs(error - 1))
        relative.append(abs(error * off["metrics"]["output_tokens_per_s"] / plain["output_tokens_per_s"] - 1))
        gain, half = log_gain(grid_folder, trial, off)
        if abs(gain) > half:
            signs.append((plain["e2e_p50_s"] > row["e2e_p50_s"]) == (gain > 0))
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
    grid = run("grid", args.out / "grid", options, trace)
    (args.out / "grid.json").write_text(json.dumps(cells(grid), indent=1) + "\n")
    funnel = run("funnel", args.out / "funnel", options, trace)
    weights = trace_weights(funnel, args.out / "funnel")
    print("weights of the batch sizes:", {batch: round(weight, 3) for batch, weight in weights.items()})
    known = gains(grid, weights)
    best = max(known, key=lambda server: known[server])
    winner = funnel["funnel"][0]["confirmation"]["winner"]
    chosen = (winner["variant"], winner["k"])
    search_s = seconds(funnel, "baseline", "search")
    cost = search_s + seconds(funnel, "confirm", "confirm2", "confirm3", "baseline_last")
    grid_s = seconds(grid, "baseline", "search")
    print(f"grid: {len(known)} servers, best {best[0]} K={best[1]} ({math.exp(known[best]):.3f}x), {grid_s:.0f} s")
    if chosen in known:
        print(f"funnel: {chosen[0]} K={chosen[1]}, {math.expm1(known[best] - known[chosen]):.2%} slower than the grid's best")
    print(f"funnel's time: {cost / grid_s:.1%} of the grid's, {search_s / grid_s:.1%} before the confirmation")
    for name, value in predictions(funnel, grid, args.out / "grid").items():
        print(f"{name}: {value:.4g}")
    playoff(grid, known, chosen, weights, trace, (args.vllm,) if args.vllm else None, VLLM_ARGS if args.vllm else ())


if __name__ == "__main__":
    main()
