"""The K schedule of a finished run for real: does it hold the best single K and off where the batch size crosses the break-even?

    python -m benchmarks.k_schedule --result RUN/result.json [--engine COMMAND] [--rounds 4] [--out rows.json]

Three servers run: off, the run's best single K, and its schedule, which is compared with each of the others. They replay the same
open-loop trace: a stretch with a few requests in flight and a burst of `BURST` at once, `CYCLES` times.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from dataclasses import replace
from pathlib import Path

from backends.types import ServingConfig
from benchmarks.turns import Part, against, gain, side_by_side
from harness.types import Load
from workloads.load import DEMO_TRACE, load_trace
from workloads.types import Request

CYCLES, CALM, BURST = 3, 8, 16
OUTPUT_TOKENS = 48


def cycles(gap_s: float) -> list[list[Request]]:
    """CYCLES × (CALM requests one every `gap_s`, then BURST at once), from the bundled sample."""
    sample = iter(load_trace(DEMO_TRACE).requests())
    arrivals = [gap_s * min(i, CALM) for i in range(CALM + BURST)]
    return [[_at(next(sample), index, at) for index, at in enumerate(arrivals)] for _ in range(CYCLES)]


def _at(request: Request, index: int, arrival_s: float) -> Request:
    sampling = {"temperature": 0, "ignore_eos": True}
    return replace(request, index=index, arrival_s=arrival_s, max_tokens=OUTPUT_TOKENS, sampling=sampling, session_id=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--engine", help="command of the engine, where it is not the default one")
    parser.add_argument("--base-args", default="", help="flags of every server, as in the run")
    parser.add_argument("--gap", type=float, default=2.4, help="seconds between requests outside bursts")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    decision = json.loads(given.result.read_text())["decisions"][0]
    best = ServingConfig.from_dict(decision["config"])
    schedule = decision["k_by_batch_size"]
    print(f"single K of the run: {best.label()}; schedule {schedule}")
    extra = {**best.extra, "k_schedule": schedule}
    off = ServingConfig.from_dict({**best.to_dict(), "variant": "off", "k": 0, "draft": None})
    configs = {"off": off, "single K": best, "schedule": replace(best, k=max(k for *_, k in schedule), extra=extra)}
    command = tuple(shlex.split(given.engine)) if given.engine else None
    parts = [Part(Load("trace", "sample"), requests) for requests in cycles(given.gap)]
    with side_by_side(configs, command=command, base_args=tuple(shlex.split(given.base_args))) as servers:
        pairs = against("schedule", servers, parts, given.rounds)
    for name, pair in pairs.items():
        value, low, high = gain(pair, parts)
        print(f"schedule over {name}: {value:.3f}x (95 % interval {low:.3f}-{high:.3f})")
    if given.out:
        e2e_s = {name: {"schedule": pair.mine.tolist(), "other": pair.other.tolist()} for name, pair in pairs.items()}
        given.out.write_text(json.dumps({"schedule": schedule, "config": best.to_dict(), "e2e_s": e2e_s}) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
