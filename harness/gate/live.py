"""Blocks from real servers: both run at once where nothing but CPU is shared, else one lifetime after the other."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from types import TracebackType

import uvloop

from backends.http_client import call
from backends.process import Server, free_port
from backends.registry import ADAPTERS
from backends.types import BackendError, Endpoint
from harness.client import ReplayOptions
from harness.environment import environment
from harness.gate.sample import sample_of
from harness.gate.session import OutOfTime
from harness.gate.sides import Side, checkout, remove_checkout
from harness.gate.types import Block, Sample
from harness.gate.workload import Workload
from harness.measure import measure
from harness.replay import Replay, replay
from harness.types import Load
from harness.warmup import RESET_PATHS, warm_up
from workloads.types import Request

ATTEMPTS = 2
"""A block that could not be measured (a start that failed, an invalid load) is measured once more before it counts."""


BUDGET_SLACK = 1.05
"""A block is given up where it would end later than this share of the budget."""


class CandidateDown(BackendError):
    """The candidate's server did not start, or died, twice."""


class Servers:
    """Starts and ends the servers of both sides."""

    def __init__(self, folder: Path, *, both_at_once: bool) -> None:
        self.folder = folder
        self.both_at_once = both_at_once
        self.starts = 0
        self.starting_s = 0.0  # spent on starts so far
        self._running: dict[str, Server] = {}
        self._warm: set[str] = set()
        self._trees: dict[str, Path] = {}

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self.stop_all()
        for tree in self._trees.values():
            remove_checkout(tree)

    def stop_all(self) -> None:
        with contextlib.ExitStack() as stack:
            for server in self._running.values():
                stack.callback(server.stop)
            self._running, self._warm = {}, set()

    def endpoint(self, name: str, side: Side) -> Endpoint:
        """The running server of this side, started if there is none.

        Raises:
            BackendError: it does not start.
        """
        if side.url:
            return _named_endpoint(side)
        server = self._running.get(name)
        if server is None or not server.alive():
            if not self.both_at_once:
                self.stop_all()
            self._running.pop(name, None)
            self._warm.discard(name)
            self._running[name] = server = self._start(name, side)
        return server.endpoint

    def first_use(self, name: str) -> bool:
        """Whether this side's server has not been warmed up yet."""
        fresh = name not in self._warm
        self._warm.add(name)
        return fresh

    def _start(self, name: str, side: Side) -> Server:
        assert side.config is not None
        self.starts += 1
        port, adapter = free_port(), ADAPTERS[side.backend]
        folder = self.folder / f"{self.starts:04d}-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        launch = adapter.launch(side.config, port=port, command=side.command, base_args=side.base_args)
        if side.revision:
            tree = self._trees.setdefault(side.revision, checkout(side.revision, self.folder))
            path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
            launch = replace(launch, env={**launch.env, "PYTHONPATH": path})
        begun_s = time.monotonic()
        server = Server.start(launch, port=port, folder=folder, backend=side.backend)
        self.starting_s += time.monotonic() - begun_s
        try:
            server.endpoint = adapter.read_back(server.endpoint, side.config, server.log())
        except BaseException:
            server.stop()
            raise
        return server


class LiveSource:
    """Measures blocks on two sides. Each block has servers of its own, except where a side is a server that already runs."""

    def __init__(self, baseline: Side, candidate: Side, workload: Workload, servers: Servers, budget_s: float) -> None:
        self.sides = {"baseline": baseline, "candidate": candidate}
        self.workload = workload
        self.servers = servers
        self.budget_s = budget_s
        self.began_s = time.monotonic()

    def elapsed_s(self) -> float:
        return time.monotonic() - self.began_s

    def block(self, number: int) -> Block:
        """
        Raises:
            CandidateDown: the candidate could not be measured twice.
            BackendError: the baseline could not be, or failed requests twice.
            OutOfTime: the block would not end within the budget.
        """
        order = Block.order(number)
        return Block.of(order, self.turns(number, order))

    def turns(self, number: int, order: Sequence[str]) -> list[Sample]:
        """One sample for each name of `order`, on the requests of block `number`."""
        part = self.workload.part(number)
        for attempt in range(1, ATTEMPTS + 1):
            self.servers.stop_all()
            name = order[0]
            samples: list[Sample] = []
            shortest_s = 0.0  # of the turns so far, without starts
            try:
                for name in order:
                    if self.elapsed_s() + shortest_s * (len(order) - len(samples)) > self.budget_s * BUDGET_SLACK:
                        raise OutOfTime
                    begun_s = self.elapsed_s() - self.servers.starting_s
                    samples.append(self._turn(name, part))
                    took_s = self.elapsed_s() - self.servers.starting_s - begun_s
                    shortest_s = min(shortest_s, took_s) if shortest_s else took_s
            except BackendError as error:
                if attempt < ATTEMPTS:
                    continue
                kind = CandidateDown if name == "candidate" else BackendError
                raise kind(f"{name}: {error}", kind=error.kind, log_tail=error.log_tail) from None
            return samples
        raise AssertionError("every attempt returns or raises")

    def _turn(self, name: str, part: Sequence[Request]) -> Sample:
        endpoint = self.servers.endpoint(name, self.sides[name])
        fresh = self.servers.first_use(name)
        loads = []
        for load in self.workload.loads:
            result = uvloop.run(_send(endpoint, part, load, self._options(), warm=fresh))
            measurement = measure(result, load, seed=self.workload.seed)
            failed = sum(measurement.requests["failures"].values())
            if failed and name == "baseline":
                raise BackendError(f"{failed} of {len(part)} requests failed: {measurement.requests['failures']}")
            if measurement.invalid and not failed:
                raise BackendError(measurement.invalid)
            loads.append((result, measurement))
        return sample_of(loads, part)

    def _options(self) -> ReplayOptions:
        return ReplayOptions(max_output_tokens=self.workload.max_output_tokens, seed=self.workload.seed, keep_outputs=True)


def runs_both_at_once(baseline: Side, candidate: Side) -> bool:
    """Two servers are kept at once unless they would share a GPU's memory; servers that already run are never started."""
    started = [side for side in (baseline, candidate) if side.url is None]
    return len(started) < 2 or not environment()["gpu"]


async def _send(endpoint: Endpoint, part: Sequence[Request], load: Load, options: ReplayOptions, *, warm: bool) -> Replay:
    if warm:
        emptied = (await warm_up(endpoint, part, load, options)).prefix_cache == "cold"
    else:
        path = RESET_PATHS.get(endpoint.backend)
        reply = path and call(f"{endpoint.base_url}{path}", {}, api_key_env=endpoint.api_key_env)
        emptied = bool(reply and reply.status == HTTPStatus.OK)
    # Equal lead-ins overlap alike in every turn, which is most of what differs between turns; from a full cache they would be read.
    return await replay(endpoint, part, load, replace(options, lead_salt="lead") if emptied else options)


def _named_endpoint(side: Side) -> Endpoint:
    """A server that already runs, with the name of the model it serves.

    Raises:
        BackendError: nothing answers there.
    """
    reply = call(f"{side.url}/v1/models")
    body = reply.json() if reply else None
    if not isinstance(body, dict) or not body.get("data"):
        raise BackendError(f"{side.url}/v1/models: no OpenAI-compatible server answers")
    return Endpoint(base_url=side.url or "", model=str(body["data"][0]["id"]), backend=side.backend)
