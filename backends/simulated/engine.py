"""The simulated engine in real time: the scheduler's virtual clock, chased by the wall clock.

A step is computed in virtual time, then delivered when the wall clock reaches its end. Where delivery is late, the next step
still begins where the last one ended, so lateness does not add up. A request that comes while a step runs is admitted by the first
step that begins after its headers were received, exactly as in the discrete-event run: reading its body takes a millisecond or two,
which the start of a step waits for.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from backends.serving import GenerationRequest, RequestError, TokenChunk
from backends.simulated import text
from backends.simulated.acceptance import Acceptance
from backends.simulated.dialects import Dialect, Reading, Server, iteration_page, statistics_page
from backends.simulated.faults import Fault, find
from backends.simulated.scheduler import Scheduler
from backends.simulated.scheduler import Sequence as Running
from backends.simulated.truth import CURRENT, RequestTruth, TruthLog
from backends.simulated.world import World
from backends.types import Gauges, SpecCounters

TIMER_S = 0.0012  # the event loop's timers are up to 1 ms late
READING_S = 0.01  # longest that a step waits for requests which are still being read


async def _until(moment_s: float) -> None:
    """Sleep until the monotonic clock reads `moment_s`; the last millisecond by asking again and again, while others run."""
    await asyncio.sleep(max(moment_s - time.monotonic() - TIMER_S, 0.0))
    while time.monotonic() < moment_s:
        await asyncio.sleep(0)


class Live:
    """One request between the scheduler and its HTTP response."""

    def __init__(self, sequence: Running) -> None:
        self.sequence = sequence
        self.per_step = sequence.steps.emitted(sequence.output_tokens - 1)
        self.step = 0  # next entry of per_step
        self.last_s = sequence.arrival_s  # model time of its last chunk
        self.chunks: asyncio.Queue[tuple[int, float]] = asyncio.Queue()  # tokens of each chunk, and its model time


class Replica:
    """One engine of a server: a scheduler, the task that runs it in real time, and its counts."""

    def __init__(self, world: World, variant: str, k: int, seed: int, log: TruthLog) -> None:
        self.scheduler = Scheduler(world, variant, k, seed)
        self._log = log
        self.scheduler.now_s = time.monotonic()
        self.live: dict[int, Live] = {}
        self.ttft_sum_s = self.chunk_gap_sum_s = 0.0
        self._generated = self._first = self._decoded = self._drafted = self._engine_steps = self._prompt = 0
        self._accepted = [0] * (k + 1)  # [n]: steps that accepted n draft tokens
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def submit(self, live: Live) -> None:
        self.live[live.sequence.index] = live
        self._prompt += live.sequence.input_tokens
        self.scheduler.submit(live.sequence)
        self._work.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def drop(self, live: Live) -> None:
        """Forget a request; one that is not finished is cancelled."""
        if self.live.pop(live.sequence.index, None) is not None:
            self.scheduler.cancel(live.sequence)

    def stall(self, seconds: float) -> None:
        """Nothing happens for so long, from now or from the end of the running step."""
        self.scheduler.now_s = max(self.scheduler.now_s, time.monotonic()) + seconds

    def counters(self) -> SpecCounters:
        k = self.scheduler.k
        at_least = tuple(sum(self._accepted[i:]) for i in range(1, k + 1))
        return SpecCounters(
            generated_tokens=self._generated,
            first_tokens=self._first,
            decode_steps=self._decoded,
            drafted_steps=self._drafted,
            draft_tokens=self._drafted * k,
            accepted_tokens=sum(at_least),
            accepted_per_position=at_least,
            prompt_tokens=self._prompt,
            prefix_hit_tokens=self.scheduler.prefix_hit_tokens,
            prefix_query_tokens=self.scheduler.prefix_query_tokens,
            preemptions=self.scheduler.preemptions,
            engine_steps=self._engine_steps,
        )

    async def _run(self) -> None:
        scheduler = self.scheduler
        while True:
            while not scheduler.busy:
                self._work.clear()
                await self._work.wait()
            give_up_s = time.monotonic() + READING_S
            while self._log.on_their_way(scheduler.now_s) and time.monotonic() < give_up_s:
                await asyncio.sleep(0)
            decoding, steps = list(scheduler.running), len(scheduler.step_end_s)
            scheduler.step(max_steps=1)
            end_s, started, finished = scheduler.now_s, scheduler.started, scheduler.finished
            if len(scheduler.step_end_s) == steps:
                decoding = []
            await _until(end_s)
            self._deliver(end_s, decoding, started, finished)

    def _deliver(self, end_s: float, decoding: list[int], started: list[Running], finished: list[Running]) -> None:
        """Hand out what the step that just ended emitted."""
        for sequence in started:
            live = self.live.get(sequence.index)
            if live is not None:
                self._first += 1
                self.ttft_sum_s += end_s - sequence.arrival_s
                self._emit(live, 1, end_s)
        ended = {sequence.index for sequence in finished}
        self._engine_steps += bool(decoding)
        for index in decoding:
            live = self.live.get(index)
            # A sequence that was preempted in front of this step took no part in it.
            if live is not None and (index in ended or index in self.scheduler.running):
                steps, tokens = live.sequence.steps, live.per_step[live.step]
                self._decoded += 1
                if steps.accepted is not None:
                    self._accepted[steps.accepted[live.step]] += 1
                    self._drafted += steps.has_draft is None or bool(steps.has_draft[live.step])
                live.step += 1
                self.chunk_gap_sum_s += end_s - live.last_s
                self._emit(live, tokens, end_s)
        for sequence in finished:
            self.live.pop(sequence.index, None)

    def _emit(self, live: Live, tokens: int, end_s: float) -> None:
        self._generated += tokens
        live.last_s = end_s
        live.chunks.put_nowait((tokens, end_s))


class SimulatedEngine:
    """A `backends.serving.ServedEngine` whose truth is known. `replicas` > 1: data parallel, the least loaded one is taken."""

    max_logprobs = 0

    def __init__(
        self,
        world: World,
        *,
        variant: str = "off",
        k: int = 0,
        model: str = "simulated",
        dialect: Dialect,
        replicas: int = 1,
        faults: Sequence[Fault] = (),
        seed: int = 0,
        log: TruthLog | None = None,
    ) -> None:
        self.model, self.world = model, world
        self.max_model_len = world.limits.max_model_len
        self._dialect, self._faults = dialect, faults
        self._server = Server(model, variant != "off" and find(faults, "no_spec_series") is None, time.time())
        self._acceptance = Acceptance(world.drafts.get(variant), k, seed)
        self._replicas = [Replica(world, variant, k, seed + i, log or TruthLog(None)) for i in range(replicas)]
        self._zero = [SpecCounters()] * replicas  # what a counter reset takes away
        self._count = 0
        self._ready_s = time.monotonic() + world.startup_s
        self._draining = False

    @property
    def ready(self) -> bool:
        hangs = find(self._faults, "hang_at_start") is not None
        return not hangs and not self._draining and time.monotonic() >= self._ready_s

    def encode(self, string: str) -> list[int]:
        return text.encode(string)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        return text.encode_chat(messages, tools)

    def decode(self, token_ids: Sequence[int]) -> str:
        return text.decode(token_ids)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        truth = CURRENT.get() or RequestTruth(request.request_id, 0, time.monotonic())
        truth.queued = True
        tokens, finish_reason = self._length(request, truth)
        number = self._number(truth, len(request.prompt_ids))
        if tokens == 0:
            truth.finish_reason = finish_reason
            yield TokenChunk((), "", finish_reason)
            return
        replica = min(self._replicas, key=lambda each: len(each.live))
        live = self._submit(replica, request, number, tokens, truth.received_s)
        lead = number % 2 + 1 if truth.fault("utf8_split") else 0
        try:
            made = 0
            while made < tokens:
                count, model_s = await live.chunks.get()
                ids = text.output_ids(request.prompt_ids, made, count, lead)
                self._note(truth, count, model_s)
                made += count
                reason = finish_reason if made == tokens else None
                truth.finish_reason = reason
                yield TokenChunk(ids, text.decode(ids), reason)
                crash = find(self._faults, "crash")
                if crash is not None and crash.at == number + 1:
                    print("CUDA error: an illegal memory access was encountered", file=sys.stderr, flush=True)
                    os._exit(1)
        finally:
            replica.drop(live)

    def _number(self, truth: RequestTruth, prompt_tokens: int) -> int:
        """Count the request, and let the faults happen that wait for its number."""
        truth.prompt_tokens = prompt_tokens
        self._count += 1
        for fault in self._faults:
            if fault.at == self._count and fault.name in ("slow_first", "stall"):
                for replica in self._replicas:
                    replica.stall(fault.value)
            if fault.at == self._count and fault.name == "counter_reset":
                self._zero = [replica.counters() for replica in self._replicas]
        return self._count - 1

    def _submit(self, replica: Replica, request: GenerationRequest, number: int, tokens: int, received_s: float) -> Live:
        reason = replica.scheduler.refuses(len(request.prompt_ids), tokens)
        if reason:
            raise RequestError(reason, field="max_tokens")
        prefix = (
            text.block_ids(request.prompt_ids, self.world.limits.kv_block_tokens) if self.world.limits.prefix_caching else ()
        )
        sequence = Running(
            number,
            received_s,
            input_tokens=len(request.prompt_ids),
            output_tokens=tokens,
            steps=self._acceptance.steps(tokens - 1, request.category),
            prefix=prefix,
        )
        live = Live(sequence)
        replica.submit(live)
        return live

    def _length(self, request: GenerationRequest, truth: RequestTruth) -> tuple[int, str]:
        """Output tokens and finish reason of a request."""
        tokens, reason = request.max_tokens, "length"
        natural = self.world.natural_output_tokens
        if natural is not None and not request.ignore_eos:
            stop = text.natural_length(request.prompt_ids, natural)
            tokens, reason = (stop, "stop") if stop < tokens else (tokens, reason)
        early = truth.fault("early_eos")
        if early is not None:
            tokens, reason = max(1, int(tokens * early.value)), "stop"
        return (0, "stop") if truth.fault("empty_output") else (tokens, reason)

    def _note(self, truth: RequestTruth, tokens: int, model_s: float) -> None:
        if truth.model_first_s is None:
            truth.model_first_s = model_s
        else:
            truth.decode_steps += 1
            truth.accepted_tokens += tokens - 1
        truth.model_last_s = model_s
        truth.made_tokens += tokens

    def _readings(self) -> list[Reading]:
        readings = []
        for replica, zero in zip(self._replicas, self._zero, strict=True):
            scheduler = replica.scheduler
            gauges = Gauges(
                running=float(len(scheduler.running) + len(scheduler.prefilling)),
                waiting=float(len(scheduler.waiting)),
                kv_use=scheduler.kv_tokens / self.world.limits.kv_capacity_tokens,
            )
            capacity = self.world.limits.kv_capacity_tokens
            counters = replica.counters() - zero
            readings.append(Reading(counters, gauges, replica.ttft_sum_s, replica.chunk_gap_sum_s, capacity))
        return readings

    async def reset_prefix_cache(self) -> None:
        """``POST /reset_prefix_cache``, as vLLM has it in its development mode."""
        for replica in self._replicas:
            replica.scheduler.forget_prefixes()

    def metrics_page(self) -> str:
        """``/metrics``."""
        if self._dialect.path != "/metrics":
            return iteration_page(self._readings())
        return self.statistics_page()

    def statistics_page(self) -> str:
        """The Prometheus page, at `Dialect.path`."""
        return statistics_page(self._dialect, self._server, self._readings())

    async def drain(self) -> None:
        self._draining = True
        while any(replica.live for replica in self._replicas):
            await asyncio.sleep(0.01)
