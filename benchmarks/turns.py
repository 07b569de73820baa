"""Servers of several configurations side by side, compared in pairs, so that what the machine does meanwhile meets both alike: at once
where they can share a CPU fairly, else one after the other."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import uvloop
from scipy import stats

from backends.process import Server, free_port
from backends.registry import ADAPTERS
from backends.types import ServingConfig
from harness.client import ReplayOptions
from harness.gate.duet import Duet, duet_for
from harness.gate.sides import Side
from harness.replay import Replay, replay
from harness.types import Load
from harness.warmup import empty_prefix_cache, warm_up
from workloads.types import Request


class Part(NamedTuple):
    load: Load
    requests: Sequence[Request]
    weight: float = 1.0  # in the mean over parts


class Pair(NamedTuple):
    """E2E in seconds, [rounds, requests of all parts]."""

    mine: np.ndarray
    other: np.ndarray


def duet_of(configs: Mapping[str, ServingConfig]) -> Duet | None:
    """How two of them can be measured at once; None where they cannot."""
    sides = [Side(name, config.backend) for name, config in configs.items()]
    return duet_for(sides[0], sides[-1])


@contextmanager
def side_by_side(
    configs: Mapping[str, ServingConfig], *, command: tuple[str, ...] | None, base_args: tuple[str, ...], duet: Duet | None
) -> Iterator[dict[str, Server]]:
    """A server of each, all of them running until the end. `command` None: the backend's own."""
    with ExitStack() as stack:
        servers = {}
        for name, config in configs.items():
            adapter = ADAPTERS[config.backend]
            port, folder = free_port(), Path(stack.enter_context(tempfile.TemporaryDirectory()))
            launch = adapter.launch(config, port=port, command=command or adapter.DEFAULT_COMMAND, base_args=base_args)
            if duet:
                launch = replace(launch, env={**launch.env, "OMP_NUM_THREADS": str(duet.threads)})
            servers[name] = stack.enter_context(Server.start(launch, port=port, folder=folder, backend=config.backend))
        yield servers


def against(mine: str, servers: Mapping[str, Server], parts: Sequence[Part], rounds: int, duet: Duet | None) -> dict[str, Pair]:
    """The server `mine` and each other one on every part, `rounds` times: as a `duet`, or in turn, the order reversed every other
    time."""
    others = [name for name in servers if name != mine]
    for server in servers.values():
        uvloop.run(warm_up(server.endpoint, parts[0].requests[:8], parts[0].load, ReplayOptions()))
    times: dict[str, tuple[list[list[float]], list[list[float]]]] = {name: ([], []) for name in others}
    for number in range(rounds):
        for name in others:
            for side in times[name]:
                side.append([])
        for i, part in enumerate(parts):
            for name in others:
                both = [servers[mine], servers[name]]
                turned = (number + i) % 2 == 1
                found = uvloop.run(_run(both[::-1] if turned else both, part, duet))
                for side, e2e_s in zip(times[name], found[::-1] if turned else found, strict=True):
                    side[-1] += e2e_s
        for name, (own, theirs) in times.items():
            print(f"round {number + 1}: mean E2E {np.mean(own[-1]):.2f} s, {name}: {np.mean(theirs[-1]):.2f} s", flush=True)
    return {name: Pair(np.array(own), np.array(theirs)) for name, (own, theirs) in times.items()}


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


async def _run(servers: Sequence[Server], part: Part, duet: Duet | None) -> list[list[float]]:
    """E2E of the part's requests on each server, none of which has them in its prefix cache."""
    for server in servers:
        await empty_prefix_cache(server.endpoint)
    loads = [replay(server.endpoint, part.requests, part.load, ReplayOptions()) for server in servers]
    if duet is None:
        return [_e2e(await load, part) for load in loads]
    exchanging = asyncio.ensure_future(duet.exchange([server.pid for server in servers]))
    try:
        return [_e2e(run, part) for run in await asyncio.gather(*loads)]
    finally:
        exchanging.cancel()


def _e2e(run: Replay, part: Part) -> list[float]:
    found = {record.index: record.e2e_s for record in run.records}
    return [found[request.index] or math.nan for request in part.requests]
