"""Servers of several configurations on one CPU, compared under the same load at the same time.

A shared host changes its speed from minute to minute by more than what is to be seen, so loads one after the other do not compare. All
servers are under load at once, and each has the whole machine for a tenth of a second in turn while the others are stopped. A server's
times are counted in its own slices: about what it would take alone, on a machine as fast as it was on average.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import replace
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
from harness.types import Load, RequestRecord
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
    slices: dict[int, list[float]] = {server.pid: [] for server in servers}
    live = set(slices)
    slicing = asyncio.ensure_future(_take_turns(slices, live))

    async def load(server: Server) -> Replay:
        run = await replay(server.endpoint, part.requests, part.load, ReplayOptions())
        if part.load.mode == "closed":  # arrivals come as fast for the others whether this one still has turns or not
            live.discard(server.pid)
        return run

    try:
        runs = await asyncio.gather(*map(load, servers))
    finally:
        slicing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await slicing
    return [_in_own_time(run, slices[server.pid]) for run, server in zip(runs, servers, strict=True)]


async def _take_turns(slices: Mapping[int, list[float]], live: Set[int]) -> None:
    """Let each process of `live` in turn run, with its children, for `SLICE_S` while the others of it are stopped, until cancelled.

    `slices`: by process, filled with when each of its slices began and ended, on the monotonic clock.
    """
    trees = {pid: [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)] for pid in slices}
    try:
        for running in itertools.cycle(slices):
            if running not in live:
                await asyncio.sleep(0)
                continue
            for pid, tree in trees.items():
                for process in tree:
                    process.suspend() if pid in live and pid != running else process.resume()
            slices[running].append(time.monotonic())
            try:
                await asyncio.sleep(SLICE_S)
            finally:
                slices[running].append(time.monotonic())
    finally:
        for process in itertools.chain(*trees.values()):
            process.resume()


def _in_own_time(run: Replay, slices: Sequence[float]) -> Replay:
    """All times of the requests as if the clock had stood still outside the server's slices."""
    spent = np.cumsum(np.append(0.0, np.diff(slices) * (np.arange(len(slices) - 1) % 2 == 0)))

    def own(at_s: float) -> float:
        return float(np.interp(run.start_clock_s + at_s, slices, spent) - np.interp(run.start_clock_s, slices, spent))

    def own_or_none(at_s: float | None) -> float | None:
        return None if at_s is None else own(at_s)

    def moved(record: RequestRecord) -> RequestRecord:
        return replace(
            record,
            intended_s=own(record.intended_s),
            sent_s=own_or_none(record.sent_s),
            first_token_s=own_or_none(record.first_token_s),
            last_token_s=own_or_none(record.last_token_s),
            chunk_s=tuple(map(own, record.chunk_s)),
        )

    begin, end = run.window_s
    return replace(run, records=[*map(moved, run.records)], window_s=(own(begin), own(end)), wall_s=own(run.wall_s))


def _e2e(run: Replay, part: Part) -> list[float]:
    found = {record.index: record.e2e_s for record in run.records}
    return [found[request.index] or math.nan for request in part.requests]
