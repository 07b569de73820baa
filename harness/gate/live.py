"""Blocks from real servers: both live at once where nothing but CPU is shared, else one lifetime after the other.

Turns follow one another, so that each side has the machine to itself; where the two can share a CPU fairly they are a duet.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import uvloop

from backends.types import BackendError, Endpoint
from harness.client import ReplayOptions
from harness.gate.duet import Duet
from harness.gate.sample import sample_of
from harness.gate.servers import Servers
from harness.gate.session import OutOfTime
from harness.gate.sides import Side
from harness.gate.types import Block, Sample
from harness.gate.workload import Workload
from harness.measure import measure
from harness.replay import Replay, replay
from harness.types import Load, Measurement
from harness.warmup import empty_prefix_cache, warm_up
from workloads.types import Request

ATTEMPTS = 2
"""A block that could not be measured (a start that failed, an invalid load) is measured once more before it counts."""


BUDGET_SLACK = 1.05
"""A block is given up where it would end later than this share of the budget."""


class CandidateDown(BackendError):
    """The candidate's server did not start, or died, twice."""


class SideFailed(Exception):
    """One side could not be measured this time."""

    def __init__(self, name: str, error: BackendError) -> None:
        super().__init__(name)
        self.name = name
        self.error = error


class LiveSource:
    """Measures blocks on two sides. Each block has servers of its own, except where a side is a server that already runs.

    With a `duet` two turns at a time, one of each side.
    """

    def __init__(
        self,
        baseline: Side,
        candidate: Side,
        workload: Workload,
        servers: Servers,
        budget_s: float,
        duet: Duet | None = None,
    ) -> None:
        self.sides = {"baseline": baseline, "candidate": candidate}
        self.workload = workload
        self.servers = servers
        self.budget_s = budget_s
        self.duet = duet
        self.began_s = time.monotonic()

    @property
    def method(self) -> str:
        return self.duet.method if self.duet else "turns one after the other"

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
        """One sample for each name of `order`, on the requests of block `number`; in a duet two and two at once."""
        part = self.workload.part(number)
        together = 2 if self.duet else 1
        groups = [order[i : i + together] for i in range(0, len(order), together)]
        for attempt in range(1, ATTEMPTS + 1):
            self.servers.stop_all()
            samples: list[Sample] = []
            shortest_s = 0.0  # of the groups so far, without starts
            try:
                for done, names in enumerate(groups):
                    if self.elapsed_s() + shortest_s * (len(groups) - done) > self.budget_s * BUDGET_SLACK:
                        raise OutOfTime
                    begun_s = self.elapsed_s() - self.servers.starting_s
                    samples += self._turns_at_once(names, part, order[: len(samples)].count(names[0]))
                    took_s = self.elapsed_s() - self.servers.starting_s - begun_s
                    shortest_s = min(shortest_s, took_s) if shortest_s else took_s
            except SideFailed as failed:
                if attempt < ATTEMPTS:
                    continue
                kind, error = CandidateDown if failed.name == "candidate" else BackendError, failed.error
                raise kind(f"{failed.name}: {error}", kind=error.kind, log_tail=error.log_tail) from None
            return samples
        raise AssertionError("every attempt returns or raises")

    def _turns_at_once(self, names: Sequence[str], part: Sequence[Request], turn: int) -> list[Sample]:
        """The sides' turn number `turn` in the block.

        In one turn both sides get equal lead-ins and the same order, so that their requests overlap alike, which is most of what differs
        between loads. The second turn has other lead-ins and the order reversed, so that the baseline against itself shows what
        rounding does in batches of other shapes.

        Raises:
            SideFailed: a server does not start, a load is invalid, or the baseline fails requests.
        """
        endpoints = []
        ordered = part[::-1] if turn else part
        for name in names:
            with _measuring(name):
                endpoints.append(self.servers.endpoint(name, self.sides[name]))
        fresh = [self.servers.first_use(name) for name in names]
        loads: list[list[tuple[Replay, Measurement]]] = [[] for _ in names]
        for load in self.workload.loads:
            sent = uvloop.run(self._send(names, endpoints, ordered, load, turn, warm=fresh))
            for name, found, measured in zip(names, sent, loads, strict=True):
                with _measuring(name):
                    if isinstance(found, BaseException):
                        raise found
                    measured.append((found, self._measure(name, found, load)))
        return [sample_of(measured, part) for measured in loads]

    def _measure(self, name: str, found: Replay, load: Load) -> Measurement:
        measurement = measure(found, load, seed=self.workload.seed)
        failed = sum(measurement.requests["failures"].values())
        if failed and name == "baseline":
            raise BackendError(f"{failed} of {len(found.records)} requests failed: {measurement.requests['failures']}")
        if measurement.invalid and not failed:
            raise BackendError(measurement.invalid)
        return measurement

    async def _send(
        self,
        names: Sequence[str],
        endpoints: Sequence[Endpoint],
        part: Sequence[Request],
        load: Load,
        turn: int,
        *,
        warm: Sequence[bool],
    ) -> list[Replay | BaseException]:
        """The load on all endpoints at the same time, each as ready as the others."""
        options = ReplayOptions(max_output_tokens=self.workload.max_output_tokens, seed=self.workload.seed, keep_outputs=True)
        emptied = await asyncio.gather(
            *(_prepared(endpoint, part, load, options, warm=w) for endpoint, w in zip(endpoints, warm, strict=True))
        )
        if all(emptied):  # else the second load would read its lead-ins from the cache
            options = replace(options, lead_salt=f"lead{turn}")
        replays = asyncio.gather(*(replay(endpoint, part, load, options) for endpoint in endpoints), return_exceptions=True)
        if self.duet is None:
            return await replays
        exchanging = asyncio.ensure_future(self.duet.exchange([self.servers.pid(name) for name in names]))
        try:
            return await replays
        finally:
            exchanging.cancel()


@contextlib.contextmanager
def _measuring(name: str) -> Iterator[None]:
    try:
        yield
    except BackendError as error:
        raise SideFailed(name, error) from None


async def _prepared(endpoint: Endpoint, part: Sequence[Request], load: Load, options: ReplayOptions, *, warm: bool) -> bool:
    """Warm the server up, or only empty its prefix cache; whether that is empty now."""
    if warm:
        return (await warm_up(endpoint, part, load, options)).prefix_cache == "cold"
    return await empty_prefix_cache(endpoint)
