"""Servers of several configurations on one CPU, compared under the same load at the same time.

A shared host changes its speed from minute to minute by more than what is to be seen, so loads one after the other do not compare. All
servers are under load at once, and each has the whole machine for a tenth of a second in turn while the others are stopped. Times of n
servers are about n times what they are alone; their ratios are those of servers that have the machine to themselves, at an arrival rate
n times as high as the one sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import uvloop
from scipy import stats

from backends.process import Server, free_port
from backends.registry import ADAPTERS
from backends.types import ServingConfig
from harness.client import ReplayOptions
from harness.replay import Replay, replay
from harness.types import Load
from harness.warmup import empty_prefix_cache, warm_up
from workloads.types import Request

SLICE_S = 0.1


class Part(NamedTuple):
    load: Load
    requests: Sequence[Request]
    weight: float = 1.0  # in the mean over parts


class Pair(NamedTuple):
    """E2E in seconds, [rounds, requests of all parts]."""

    mine: np.ndarray
    other: np.ndarray


@contextmanager
def side_by_side(
    configs: Mapping[str, ServingConfig], *, command: tuple[str, ...] | None, base_args: tuple[str, ...]
) -> Iterator[dict[str, Server]]:
    """A server of each, all of them running until the end. `command` None: the backend's own."""
    with ExitStack() as stack:
        servers = {}
        for name, config in configs.items():
            adapter = ADAPTERS[config.backend]
            port, folder = free_port(), Path(stack.enter_context(tempfile.TemporaryDirectory()))
            launch = adapter.launch(config, port=port, command=command or adapter.DEFAULT_COMMAND, base_args=base_args)
            servers[name] = stack.enter_context(Server.start(launch, port=port, folder=folder, backend=config.backend))
        yield servers


def against(mine: str, servers: Mapping[str, Server], parts: Sequence[Part], rounds: int) -> dict[str, Pair]:
    """The server `mine` and each other one on every part, `rounds` times."""
    others = [name for name in servers if name != mine]
    warm(servers, parts[0])
    rows: dict[str, list[list[list[float]]]] = {name: [] for name in others}  # name -> [round][side][request]
    for number in range(rounds):
        for name in others:
            found = [[_e2e(run, part) for run in at_once((servers[mine], servers[name]), part)] for part in parts]
            own, theirs = ([e2e_s for part in found for e2e_s in part[side]] for side in (0, 1))
            rows[name].append([own, theirs])
            print(f"round {number + 1}: mean E2E {np.mean(own):.2f} s, {name}: {np.mean(theirs):.2f} s", flush=True)
    return {name: Pair(*np.array(found).swapaxes(0, 1)) for name, found in rows.items()}


def gain(pair: Pair, parts: Sequence[Part]) -> tuple[float, float, float]:
    """Speed-up of `mine` over the other server with its 95 % interval: the ratio of a request's E2E on both in log, the mean over
    rounds, requests and, by their weights, parts. The interval is over requests or over the parts' repetitions, whichever spreads more.
    """
    ends = np.cumsum([len(part.requests) for part in parts])
    logs = np.split(np.log(pair.other / pair.mine), ends[:-1], axis=1)  # by part, [rounds, requests]
    weights = np.array([part.weight for part in parts]) / sum(part.weight for part in parts)
    value = float(sum(w * part.mean() for w, part in zip(weights, logs, strict=True)))
    rounds = len(pair.mine)
    by_request = sum(w**2 * part.mean(0).var(ddof=1) / part.shape[1] for w, part in zip(weights, logs, strict=True))
    repeated = sum(w**2 * part.mean(1).var(ddof=1) / rounds for w, part in zip(weights, logs, strict=True))
    half = max(
        math.sqrt(by_request) * float(stats.t.ppf(0.975, int(ends[-1]) - len(parts))),
        math.sqrt(repeated) * float(stats.t.ppf(0.975, len(parts) * (rounds - 1))),
    )
    return math.exp(value), math.exp(value - half), math.exp(value + half)


def warm(servers: Mapping[str, Server], part: Part) -> None:
    for server in servers.values():
        uvloop.run(warm_up(server.endpoint, part.requests[:8], part.load, ReplayOptions()))


def at_once(servers: Sequence[Server], part: Part) -> list[Replay]:
    """The part's load on all of them, none of which has its prompts in the prefix cache."""
    return uvloop.run(_at_once(servers, part))


async def _at_once(servers: Sequence[Server], part: Part) -> list[Replay]:
    for server in servers:
        await empty_prefix_cache(server.endpoint)
    slicing = asyncio.ensure_future(_take_turns([server.pid for server in servers]))
    try:
        loads = [replay(server.endpoint, part.requests, part.load, ReplayOptions()) for server in servers]
        return await asyncio.gather(*loads)
    finally:
        slicing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await slicing


async def _take_turns(pids: Sequence[int]) -> None:
    """Let each process in turn run, with its children, for `SLICE_S` while the others are stopped, until cancelled."""
    trees = [[process, *process.children(recursive=True)] for process in map(psutil.Process, pids)]
    everything = list(itertools.chain(*trees))
    try:
        for running in itertools.cycle(trees):
            for process in everything:
                if process not in running:
                    process.suspend()
            for process in running:
                process.resume()
            await asyncio.sleep(SLICE_S)
    finally:
        for process in everything:
            process.resume()


def _e2e(run: Replay, part: Part) -> list[float]:
    found = {record.index: record.e2e_s for record in run.records}
    return [found[request.index] or math.nan for request in part.requests]
