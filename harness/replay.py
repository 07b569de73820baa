"""One load on one server: requests at the trace's own times (open loop), or a fixed number at once (closed loop).

Latency counts from the *intended* time. In open loop that is arrival × time_scale, whether or not the client was in time, so a
stall of the server delays nobody's clock (no coordinated omission). In closed loop it is the moment the slot became free.

A closed loop is measured at full concurrency only. A lead-in fills all slots before the first measured request and a lead-out
keeps them filled until the last one has ended. Both are shortened requests whose prompts share no prefix with any other; lead-in
requests end one after another, so that the measured ones do not start in step. They are counted and never measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from backends.types import BackendError, Endpoint, Gauges, SpecCounters
from harness.client import Call, ReplayOptions, call_of, headers, payload, record, server_words, unseen
from harness.gpu_state import GpuWatch
from harness.pacer import sleep_until
from harness.stream import StreamReader
from harness.telemetry import Telemetry
from harness.types import Load, RequestRecord
from harness.wire import Exchange, Origin, Pool, exchange_on
from workloads.types import Request, WorkloadError

CONNECT_AHEAD_S = 0.05  # a connection is ready before its request is due
STOP_CHECK_S = 0.25
HERE = ("127.0.0.1", "localhost", "::1")
LEAD_TOKENS = 64  # of a lead-in request whose length nobody knows


@dataclass(frozen=True, slots=True)
class Replay:
    """What one load left behind. Times are seconds from the start of the load."""

    load: Load
    records: list[RequestRecord]  # one for each request, in the order given
    lead: list[RequestRecord]  # lead-in and lead-out of a closed loop, not measured
    window_s: tuple[float, float]
    wall_s: float
    counters: SpecCounters | None  # increase over the whole load, lead-in and lead-out included
    gauges: tuple[tuple[float, Gauges], ...] = ()
    warnings: tuple[str, ...] = ()
    invalid: str | None = None
    send_lag_limit_s: float = 0.005
    start_clock_s: float = 0.0  # of the monotonic clock
    run_id: str = ""  # requests carried X-Request-Id: <run_id>-<index>
    excluded: dict[str, int] = field(default_factory=dict)
    client_busy: float = 0.0  # share of a core that the client used, the fullest one of several
    gpus: list[dict[str, Any]] | None = None  # clocks, temperature and slowdowns of this machine's


class Sender:
    """Sends calls to one server and turns what comes back into records."""

    def __init__(self, endpoint: Endpoint, options: ReplayOptions, pool: Pool, run_id: str) -> None:
        self.endpoint = endpoint
        self.options = options
        self.pool = pool
        self.run_id = run_id
        self.start_s = 0.0
        self.stopped = False
        self.words: dict[str, str] = {}  # failure kind -> what the server said the first time
        self._headers = headers(endpoint)

    def render(self, call: Call, suffix: str = "") -> bytes:
        return payload(call, self.pool.origin, self._headers, f"{self.run_id}-{call.request.index}{suffix}")

    def stop(self) -> None:
        """Cancel what runs and what is still to be sent."""
        self.stopped = True
        self.pool.close()

    async def until(self, clock_s: float) -> None:
        """Return at a time of the monotonic clock, or soon after the load was stopped."""
        while not self.stopped and clock_s - time.monotonic() > STOP_CHECK_S:
            await asyncio.sleep(STOP_CHECK_S / 2)
        if not self.stopped:
            await sleep_until(clock_s)

    async def perform(self, call: Call, data: bytes, intended_s: float, *, wait: bool = False) -> RequestRecord:
        """Send one request, at its intended clock time if `wait` is set, else now."""
        reader = StreamReader()
        exchange = Exchange(reader, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(self.options.request_deadline_s):
                connection = await self.pool.take()
        except (OSError, TimeoutError):
            exchange.failure = "connect"
        else:
            if wait:
                await self.until(intended_s)
            if connection.closed and not self.stopped:  # while it waited; nothing was sent on it
                connection = await self.pool.take()
            if self.stopped:
                exchange.failure = "cancelled"
                connection.abort("cancelled")
            else:
                await exchange_on(connection, data, exchange, self.options.request_deadline_s)
            self.pool.give_back(connection)
        done = record(call.request, exchange, reader, intended_s, self.start_s, self.options)
        if done.failure:
            self.words.setdefault(done.failure, server_words(exchange, reader) or "")
        return done


@dataclass(frozen=True, slots=True)
class Sent:
    """What sending a load left behind, without the server's own counts."""

    records: list[RequestRecord]
    lead: list[RequestRecord]
    start_s: float  # of the monotonic clock; the records' times count from it
    run_id: str
    words: dict[str, str]
    busy: float  # share of one core that this process used meanwhile


async def replay(endpoint: Endpoint, requests: Sequence[Request], load: Load, options: ReplayOptions) -> Replay:
    """Send every request once and wait for all of them.

    Raises:
        BackendError: the server does not answer at all.
        WorkloadError: there is no request, or one without text; in open loop one without a time.
        ConfigError: the API key's variable is not set.
    """
    if not requests:
        raise WorkloadError(f"trace '{load.trace}': no requests to send")
    telemetry = Telemetry(endpoint, Pool(Origin.of(endpoint.base_url)))
    gpus = GpuWatch.here() if Origin.of(endpoint.base_url).host in HERE else None
    began = time.monotonic()
    try:
        before = await telemetry.read()
        watching = [asyncio.ensure_future(telemetry.sample())]
        if gpus is not None:
            watching.append(asyncio.ensure_future(gpus.sample()))
        try:
            if options.processes > 1:
                from harness.fanout import send_from_several

                sent = await send_from_several(endpoint, requests, load, options)
            else:
                sent = await send(endpoint, requests, load, options)
        finally:
            for task in watching:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*watching)
        wall_s = time.monotonic() - began
        after = await telemetry.settled()
    finally:
        telemetry.close()
        if gpus is not None:
            gpus.close()
    counters, warnings, invalid = _window_counters(before, after)
    if options.processes > 1:
        warnings.append(f"sent from {options.processes} client processes, since one core could not hold the load")
    return Replay(
        load=load,
        records=sent.records,
        lead=sent.lead,
        window_s=_window(sent.records),
        wall_s=wall_s,
        counters=counters,
        gauges=tuple((at - sent.start_s, gauges) for at, gauges in telemetry.samples),
        warnings=(*warnings, *_failure_words(sent.words)),
        invalid=telemetry.broken or invalid or (gpus.problem() if gpus else None),
        send_lag_limit_s=options.send_lag_limit_s,
        start_clock_s=sent.start_s,
        run_id=sent.run_id,
        excluded={"lead": len(sent.lead)} if sent.lead else {},
        client_busy=sent.busy,
        gpus=gpus.summary() if gpus else None,
    )


async def send(
    endpoint: Endpoint, requests: Sequence[Request], load: Load, options: ReplayOptions, *, start_s: float | None = None
) -> Sent:
    """Send every request once, from this process; `start_s` is the clock time from which arrivals and records count."""
    calls = [call_of(request, endpoint, options) for request in requests]
    pool = Pool(Origin.of(endpoint.base_url))
    sender = Sender(endpoint, options, pool, uuid4().hex[:12])
    deadline: asyncio.TimerHandle | None = None
    try:
        await _check_answers(pool, endpoint)
        if options.load_deadline_s is not None:
            deadline = asyncio.get_running_loop().call_later(options.load_deadline_s, sender.stop)
        gc.collect()
        gc.freeze()  # a full collection would stop the load for milliseconds; what a load makes is small and has no cycles
        gc.disable()
        began, used = time.monotonic(), time.process_time()
        try:
            if load.mode == "closed":
                records, lead = await _closed(sender, calls, load, start_s)
            else:
                records, lead = await _open(sender, calls, load, start_s), []
            busy = (time.process_time() - used) / max(time.monotonic() - began, 1e-9)
        finally:
            gc.enable()
            gc.unfreeze()
            if deadline is not None:
                deadline.cancel()
    finally:
        pool.close()
    return Sent(records, lead, sender.start_s, sender.run_id, sender.words, busy)


async def _check_answers(pool: Pool, endpoint: Endpoint) -> None:
    try:
        async with asyncio.timeout(10.0):
            pool.give_back(await pool.take())
    except (OSError, TimeoutError) as error:
        raise BackendError(f"no server answers at {endpoint.base_url}: {error or 'timed out'}", kind="crash") from None


async def _open(sender: Sender, calls: Sequence[Call], load: Load, start_s: float | None) -> list[RequestRecord]:
    missing = next((call.request for call in calls if call.request.arrival_s is None), None)
    if missing is not None:
        raise WorkloadError(f"trace '{load.trace}': request {missing.index} has no arrival time; replay it in closed loop")
    scale = 1.0 if load.time_scale is None else load.time_scale
    times = [(call.request.arrival_s or 0.0) * scale for call in calls]
    prepared = [sender.render(call) for call in calls]
    sender.start_s = time.monotonic() + 2 * CONNECT_AHEAD_S - min(times) if start_s is None else start_s
    tasks: dict[int, asyncio.Task[RequestRecord]] = {}
    for i in sorted(range(len(calls)), key=times.__getitem__):
        due = sender.start_s + times[i]
        await sender.until(due - CONNECT_AHEAD_S)
        tasks[i] = asyncio.ensure_future(sender.perform(calls[i], prepared[i], due, wait=True))
    return [await tasks[i] for i in range(len(calls))]


async def _closed(
    sender: Sender, calls: Sequence[Call], load: Load, start_s: float | None
) -> tuple[list[RequestRecord], list[RequestRecord]]:
    users = load.concurrency or 1
    sender.start_s = time.monotonic() if start_s is None else start_s
    prepared = [sender.render(call) for call in calls]
    records: dict[int, RequestRecord] = {}
    lead: list[RequestRecord] = []
    queue = iter(range(len(calls)))
    in_flight: dict[int, float] = {}  # measured request -> when it was sent
    spare = 0

    def filler(max_tokens: int) -> tuple[Call, bytes]:
        nonlocal spare
        spare += 1
        original = calls[-spare % len(calls)].request
        marked = unseen(original, f"{sender.options.lead_salt or sender.run_id}/{spare}")
        call = call_of(marked, sender.endpoint, sender.options).shortened(max_tokens)
        return call, sender.render(call, f"-lead{spare}")

    async def user(number: int) -> None:
        length = calls[number % len(calls)].max_tokens or LEAD_TOKENS
        free_s = time.monotonic()
        call, data = filler(round(length * (number + 1) / users))
        lead.append(await sender.perform(call, data, free_s))
        for i in queue:
            free_s = time.monotonic()
            in_flight[i] = free_s
            records[i] = await sender.perform(calls[i], prepared[i], free_s)
            del in_flight[i]
        while in_flight:
            longest = max(calls[i].max_tokens or LEAD_TOKENS for i in in_flight)
            call, data = filler(longest)
            lead.append(await sender.perform(call, data, time.monotonic()))
            if lead[-1].status != "completed":
                break

    await sender.until(sender.start_s)
    await asyncio.gather(*(user(number) for number in range(users)))
    return [records[i] for i in range(len(calls))], lead


def _window(records: Sequence[RequestRecord]) -> tuple[float, float]:
    """From the first intended time to the last token."""
    ends = [record.last_token_s for record in records if record.last_token_s is not None]
    start = min(record.intended_s for record in records)
    return start, max(ends, default=start)


Reading = tuple[SpecCounters, Gauges] | None


def _window_counters(before: Reading, after: Reading) -> tuple[SpecCounters | None, list[str], str | None]:
    """Increase of the counts, warnings, and why the load cannot be used."""
    if before is None:
        return None, ["the server has no statistics page that can be read: tau is not known from its counters"], None
    if after is None:
        return None, [], "the server's statistics page is gone after the load"
    warnings = []
    if before[1].running:
        warnings.append(f"{before[1].running:.0f} requests of others were running on the server when the load began")
    if after[1].running:
        warnings.append(f"{after[1].running:.0f} requests were still running on the server after the load")
    try:
        return after[0] - before[0], warnings, None
    except ValueError as error:
        return None, warnings, str(error)


def _failure_words(words: dict[str, str]) -> list[str]:
    return [f"first {kind} failure: {text[:200]}" for kind, text in words.items() if text]
