"""Servers of several configurations side by side, used in turn, so that what the machine does meanwhile meets all of them alike."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from workloads.types import Request

LoadOf = tuple[Load, Sequence[Request]]


@contextmanager
def side_by_side(
    configs: Mapping[str, ServingConfig], *, command: tuple[str, ...] | None, base_args: tuple[str, ...]
) -> Iterator[dict[str, Endpoint]]:
    """A server of each, all of them running until the end. `command` None: the backend's own."""
    with ExitStack() as stack:
        endpoints = {}
        for name, config in configs.items():
            adapter = ADAPTERS[config.backend]
            port, folder = free_port(), Path(stack.enter_context(tempfile.TemporaryDirectory()))
            launch = adapter.launch(config, port=port, command=command or adapter.DEFAULT_COMMAND, base_args=base_args)
            server = stack.enter_context(Server.start(launch, port=port, folder=folder, backend=config.backend))
            endpoints[name] = server.endpoint
        yield endpoints


def in_turn(
    endpoints: Mapping[str, Endpoint], loads: Sequence[LoadOf], rounds: int, say: Callable[[str], None] = print
) -> dict[str, np.ndarray]:
    """E2E of every request in seconds by server: [rounds, requests of all loads]. Each load is run on all servers before the next
    one, in an order that rotates."""
    names = list(endpoints)
    for load, requests in loads:
        for endpoint in endpoints.values():
            uvloop.run(warm_up(endpoint, requests[:8], load, ReplayOptions()))
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names:
            times[name].append([])
        for i, (load, requests) in enumerate(loads):
            for name in np.roll(names, number + i).tolist():
                times[name][-1] += _e2e(endpoints[name], load, requests)
        for name in names:
            say(f"round {number + 1}, {name}: mean E2E {np.mean(times[name][-1]) * 1e3:.0f} ms")
    return {name: np.array(rows) for name, rows in times.items()}


def gain(over: np.ndarray, of: np.ndarray, loads: Sequence[LoadOf]) -> tuple[float, float, float]:
    """Speed-up of `of` over `over` with its 95 % interval: the ratio of a request's E2E on both in log, the mean over rounds, requests
    and loads. The interval is over requests and over rounds, whichever spreads more."""
    each = np.log(over / of)
    weights = np.concatenate([np.full(len(requests), 1 / len(requests) / len(loads)) for _, requests in loads])
    weighted = each * weights * each.shape[1]  # a mean over all requests is then one over loads
    spreads = [(parts.std(ddof=1) / math.sqrt(len(parts)), len(parts)) for parts in (weighted.mean(0), weighted.mean(1))]
    half = max(se * float(stats.t.ppf(0.975, n - 1)) for se, n in spreads)
    value = float(weighted.mean())
    return math.exp(value), math.exp(value - half), math.exp(value + half)


def _e2e(endpoint: Endpoint, load: Load, requests: Sequence[Request]) -> list[float]:
    run = uvloop.run(replay(endpoint, requests, load, ReplayOptions()))
    found = {record.index: record.e2e_s for record in run.records}
    return [found[request.index] or math.nan for request in requests]
