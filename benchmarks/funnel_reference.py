"""The funnel against the full grid on the reference engine, both for real: needs a machine that does nothing else for hours.

python -m benchmarks.funnel_reference --out DIR [--small]

The whole of it is off and n-gram, suffix and a draft model (the target's own int4 copy) at K 1-6 and four batch sizes: 76 cells. Each
strategy is a run of the main job of its own; a directory that holds a finished run is read and not measured again. Costs are those of
the trials, server starts included: the grid's baseline and search against the funnel's baseline, search and confirmation.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
FULL = ("--variants", "off,ngram,suffix,draft_model", "--k", "1..6", "--batch-sizes", "1,4,8,16")
SMALL = ("--variants", "off,ngram", "--k", "1..3", "--batch-sizes", "1,4", "--limit", "40", "--max-output-tokens", "32")
Key = tuple[str, int, int]  # variant, K, batch size


def run(strategy: str, out: Path, options: tuple[str, ...], trace: str) -> dict[str, Any]:
    if not (out / "result.json").exists():
        command = [sys.executable, str(ROOT / "tune.py"), "--trace", trace, "--strategy", strategy, "--out", str(out), *options]
        if any("draft_model" in option for option in options):
            command += ["--draft", "draft_model=self-int4"]
        subprocess.run(command, check=True)
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return result


def trials(result: dict[str, Any], *stages: str) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Measured closed-loop trials of the stages, by cell."""
    for trial in result["trials"]:
        if trial["stage"] in stages and trial["metrics"] and trial["load"]["mode"] == "closed":
            yield (trial["config"]["variant"], trial["config"]["k"], trial["load"]["concurrency"]), trial


def seconds(result: dict[str, Any], *stages: str) -> float:
    return sum(trial["cost"]["seconds"] for trial in result["trials"] if trial["stage"] in stages)


def gains(result: dict[str, Any]) -> dict[tuple[str, int], float]:
    """Mean log speed-up of E2E p50 over the batch sizes for each server that the grid measured; off has 0."""
    p50 = {key: trial["metrics"]["e2e_s"]["p50"] for key, trial in trials(result, "baseline", "search")}
    batches = sorted({batch for _, _, batch in p50})
    servers = {(variant, k) for variant, k, _ in p50}
    return {
        (variant, k): float(np.mean([math.log(p50["off", 0, b] / p50[variant, k, b]) for b in batches]))
        for variant, k in servers
        if all((variant, k, b) in p50 for b in batches)
    }


def predictions(funnel: dict[str, Any], grid: dict[str, Any]) -> dict[str, float]:
    """What the funnel predicted after its probes against what the grid measured, in cells that the funnel did not measure."""
    measured = dict(trials(grid, "baseline", "search"))
    tau, rate, signs = [], [], []
    for row in funnel["predictions"]:
        key = (row["config"]["variant"], row["config"]["k"], row["load"]["concurrency"])
        trial = measured.get(key)
        if trial is None or row["measured_in_trial"] is not None:
            continue
        tau.append(abs(row["tau"] / trial["speculation"]["tau"] - 1))
        rate.append(abs(row["output_tokens_per_s"] / trial["metrics"]["output_tokens_per_s"] - 1))
        ci95 = (trial["speedup"] or {}).get("ci95")
        if ci95 and not ci95[0] <= 1 <= ci95[1]:
            off = next(r for r in funnel["predictions"] if r["config"]["k"] == 0 and r["load"] == row["load"])
            signs.append((off["e2e_p50_s"] > row["e2e_p50_s"]) == (trial["speedup"]["value"] > 1))
    return {
        "cells": len(tau),
        "tau_median_error": float(np.median(tau)) if tau else math.nan,
        "tokens_per_s_median_error": float(np.median(rate)) if rate else math.nan,
        "cells_with_a_sign": len(signs),
        "signs_right": float(np.mean(signs)) if signs else math.nan,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trace", default=str(ROOT / "workloads" / "samples" / "demo.jsonl"))
    parser.add_argument(
        "--small", action="store_true", help="off and n-gram at three K and two batch sizes: a trial of the command"
    )
    args = parser.parse_args()
    options = SMALL if args.small else FULL
    grid = run("grid", args.out / "grid", options, args.trace)
    funnel = run("funnel", args.out / "funnel", options, args.trace)
    known = gains(grid)
    best = max(known, key=lambda server: known[server])
    decided = funnel["decisions"][0]["config"]
    chosen = (decided["variant"], decided["k"])
    cost = seconds(funnel, "baseline", "search", "confirm", "confirm2", "baseline_last")
    grid_s = seconds(grid, "baseline", "search")
    print(f"grid: {len(known)} servers, best {best[0]} K={best[1]} ({math.exp(known[best]):.3f}x), {grid_s:.0f} s")
    if chosen in known:
        print(f"funnel: {chosen[0]} K={chosen[1]}, {math.expm1(known[best] - known[chosen]):.2%} slower than the grid's best")
    print(f"funnel's time: {cost / grid_s:.1%} of the grid's")
    for name, value in predictions(funnel, grid).items():
        print(f"{name}: {value:.4g}")


if __name__ == "__main__":
    main()
