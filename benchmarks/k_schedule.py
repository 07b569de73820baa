"""The K schedule of a finished run for real: does it hold the best single K and off where the batch size crosses the break-even?

    python -m benchmarks.k_schedule --result RUN/result.json [--engine COMMAND] [--rounds 4] [--out rows.json]

Three servers run at once and are used in turn, in an order that rotates: off, the run's best single K, and its schedule. Each replays the
same open-loop trace: stretches with one or two requests in flight and bursts of `BURST` at once, `CYCLES` times. A request's speed-up is
the ratio of its E2E latencies on two servers, in log, its mean over rounds; the interval is over requests and rounds, whichever spreads
more.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import uvloop
from scipy import stats

from backends.process import Server, free_port
from backends.registry import ADAPTERS
from backends.types import Endpoint, ServingConfig
from harness.client import ReplayOptions
from harness.replay import replay
from harness.types import Load
from harness.warmup import warm_up
from workloads.load import DEMO_TRACE, load_trace
from workloads.types import Request

CYCLES, CALM, BURST = 3, 8, 16
OUTPUT_TOKENS = 48


def trace(gap_s: float) -> list[Request]:
    """CYCLES × (CALM requests one every `gap_s`, then BURST at once and time to serve them), from the bundled sample."""
    sample = iter(load_trace(DEMO_TRACE).requests())
    requests: list[Request] = []
    now = 0.0
    for _ in range(CYCLES):
        for _ in range(CALM):
            now += gap_s
            requests.append(_at(next(sample), len(requests), now))
        now += gap_s
        requests += [_at(next(sample), len(requests) + i, now) for i in range(BURST)]
        now += 0.35 * BURST * gap_s
    return requests


def _at(request: Request, index: int, arrival_s: float) -> Request:
    sampling = {"temperature": 0, "ignore_eos": True}
    return replace(request, index=index, arrival_s=arrival_s, max_tokens=OUTPUT_TOKENS, sampling=sampling, session_id=None)


def e2e(endpoint: Endpoint, requests: list[Request]) -> list[float]:
    run = uvloop.run(replay(endpoint, requests, Load("trace", "sample"), ReplayOptions()))
    found = {record.index: record.e2e_s for record in run.records}
    return [found[request.index] or math.nan for request in requests]


def gain(over: np.ndarray, of: np.ndarray) -> tuple[float, float, float]:
    """Log speed-up of `of` over `over`, both [rounds, requests], with its 95 % interval."""
    each = np.log(over / of)
    spreads = [(parts.std(ddof=1) / math.sqrt(len(parts)), len(parts)) for parts in (each.mean(0), each.mean(1))]
    half = max(se * float(stats.t.ppf(0.975, n - 1)) for se, n in spreads)
    value = float(each.mean())
    return value, value - half, value + half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--engine", help="command of the engine, where it is not the default one")
    parser.add_argument("--base-args", default="", help="flags of every server, as in the run")
    parser.add_argument("--gap", type=float, default=1.2, help="seconds between requests outside bursts")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    decision = json.loads(given.result.read_text())["decisions"][0]
    best = ServingConfig.from_dict(decision["config"])
    schedule = decision["k_by_batch_size"]
    print(f"best single K: {best.label()}; schedule {schedule}")
    extra = {**best.extra, "k_schedule": schedule}
    off = ServingConfig.from_dict({**best.to_dict(), "variant": "off", "k": 0, "draft": None})
    configs = {"off": off, "single K": best, "schedule": replace(best, k=max(k for *_, k in schedule), extra=extra)}
    adapter = ADAPTERS[best.backend]
    command = tuple(shlex.split(given.engine)) if given.engine else adapter.DEFAULT_COMMAND
    requests = trace(given.gap)
    times: dict[str, list[list[float]]] = {name: [] for name in configs}
    with ExitStack() as stack:
        endpoints = {}
        for name, config in configs.items():
            port, folder = free_port(), Path(stack.enter_context(tempfile.TemporaryDirectory()))
            launch = adapter.launch(config, port=port, command=command, base_args=tuple(shlex.split(given.base_args)))
            server = stack.enter_context(Server.start(launch, port=port, folder=folder, backend=best.backend))
            endpoints[name] = server.endpoint
            uvloop.run(warm_up(server.endpoint, requests[:8], Load("closed", "sample", concurrency=4), ReplayOptions()))
        names = list(configs)
        for number in range(given.rounds):
            for name in np.roll(names, number).tolist():
                times[name].append(e2e(endpoints[name], requests))
                print(f"round {number + 1}, {name}: mean E2E {np.mean(times[name][-1]) * 1e3:.0f} ms", flush=True)
    arrays = {name: np.array(rows) for name, rows in times.items()}
    for other in ("off", "single K"):
        value, low, high = (math.exp(x) for x in gain(arrays[other], arrays["schedule"]))
        print(f"schedule over {other}: {value:.3f}x (95 % interval {low:.3f}-{high:.3f})")
    if given.out:
        given.out.write_text(json.dumps({"schedule": schedule, "config": best.to_dict(), "e2e_s": times}) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
