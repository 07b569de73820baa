"""Continuous batching in virtual time: the one model behind the discrete-event run and the real-time server.

A step decodes all running sequences and, as far as the token budget goes, prefills waiting ones (first come, first served).
With chunked prefill a prompt may take several steps beside the decoding; without, prompts are prefilled whole in steps of their
own and decoding waits. The step that completes a prompt emits its first token. When the KV cache is full, the youngest running
sequence is preempted: its cache is dropped and computed again later.

Work per step is constant, whatever the batch: how many steps a sequence takes is known when it comes (acceptance depends on the
text, not on the batch), so a heap of finish times replaces a loop over sequences. A sequence's context is taken to grow evenly.
"""

from __future__ import annotations

import heapq
import math
from collections import deque

import numpy as np

from backends.simulated.acceptance import Steps
from backends.simulated.prefix_cache import PrefixCache
from backends.simulated.world import World, step_cost

NOISE_BLOCK = 4096
LONG_RUN = 64  # decode steps without an event from which on they are computed as arrays
WATERMARK = 0.01  # share of the KV cache kept free at admission, so that a preempted sequence is not admitted again at once


class Sequence:
    """One request on its way through the engine."""

    __slots__ = (
        "arrival_s",
        "cached_tokens",
        "context",
        "done_steps",
        "finish_at",
        "first_token_s",
        "growth",
        "index",
        "input_tokens",
        "last_token_s",
        "output_tokens",
        "preemptions",
        "prefill_left",
        "prefix",
        "segments",
        "started_at",
        "steps",
    )

    def __init__(
        self,
        index: int,
        arrival_s: float,
        *,
        input_tokens: int,
        output_tokens: int,
        steps: Steps,
        prefix: tuple[int, ...] = (),
    ) -> None:
        self.index, self.arrival_s = index, arrival_s
        self.input_tokens, self.output_tokens = input_tokens, output_tokens
        self.steps, self.prefix = steps, prefix
        self.growth = (output_tokens - 1) / steps.count if steps.count else 0.0  # context tokens a step
        self.context = float(input_tokens)  # tokens in the KV cache when it last (re)started
        self.prefill_left = input_tokens
        self.cached_tokens = 0
        self.done_steps = 0  # decode steps before the current run
        self.started_at = 0  # decode step counter when the current run began
        self.finish_at = -1  # decode step counter at which it ends; -1 while it does not run
        self.segments: list[tuple[int, int]] = []  # decode steps it took part in, as ranges of the counter
        self.first_token_s = self.last_token_s = math.nan
        self.preemptions = 0


class Scheduler:
    """State of one engine. `submit` in order of arrival what it does not refuse, `step` while `busy`.

    `now_s` is the end of the last step.
    """

    def __init__(self, world: World, variant: str, k: int, seed: int = 0) -> None:
        self.world, self.variant, self.k = world, variant, k
        self.now_s = 0.0
        self.step_end_s: list[float] = []  # end of every decode step: index is the decode step counter
        self.engine_steps = 0
        self.preemptions = 0
        self.prefix_hit_tokens = self.prefix_query_tokens = 0
        self.waiting: deque[Sequence] = deque()
        self.prefilling: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}  # in order of start
        self.finished: list[Sequence] = []  # by the last step
        self.started: list[Sequence] = []  # emitted their first token in the last step
        self._limits = world.limits
        self._heap: list[tuple[int, int, Sequence]] = []
        self._context = 0.0  # tokens of the running sequences
        self._growth = 0.0
        self._reserved = 0.0  # tokens of the sequences in prefill
        self._costs: dict[int, tuple[float, float]] = {}
        self._cache = PrefixCache(world.limits.kv_block_tokens) if world.limits.prefix_caching else None
        self._rng = np.random.default_rng([seed, world.seed, 2])
        self._run_factor = math.exp(world.noise.run_sigma * self._rng.standard_normal() - world.noise.run_sigma**2 / 2)
        self._drift_per_s = world.noise.drift_per_hour / 3600.0
        self._noise: list[tuple[float, float]] = []
        self._phase = world.noise.slow_phase
        self._noisy = world.noise.step_sigma > 0.0 or world.noise.stall_share > 0.0
        self._steady = not self._noisy and self._drift_per_s == 0.0 and self._phase is None

    @property
    def busy(self) -> bool:
        return bool(self.running or self.prefilling or self.waiting)

    @property
    def kv_tokens(self) -> float:
        return self._context + self._reserved

    def refuses(self, input_tokens: int, output_tokens: int) -> str | None:
        """Why such a request can never be served; None if it can."""
        need = input_tokens + output_tokens
        if need > self._limits.max_model_len:
            return f"{need} tokens exceed the context of {self._limits.max_model_len}"
        if need > self._limits.kv_capacity_tokens:
            return f"{need} tokens exceed the KV cache of {self._limits.kv_capacity_tokens}"
        return None

    def submit(self, sequence: Sequence) -> None:
        """Queue a request. An idle engine's clock moves on to its arrival."""
        if not self.busy:
            self.now_s = max(self.now_s, sequence.arrival_s)
        self.waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Drop a sequence wherever it is."""
        if self.running.pop(sequence.index, None) is not None:
            self._leave(sequence)
        elif sequence in self.prefilling:
            self.prefilling.remove(sequence)
            self._reserved -= sequence.context
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache."""
        if self._cache is not None:
            self._cache.shrink(0)

    def step(self, until_s: float = math.inf, max_steps: int | None = None) -> None:
        """One step with prefill, or decode steps until one ends at or after `until_s`, one finishes a sequence, or `max_steps`.

        Afterwards `started` and `finished` tell what the last step did.
        """
        self.started, self.finished = [], []
        if not self.running and not self.prefilling:
            self.now_s = max(self.now_s, self.waiting[0].arrival_s)
        prefill_tokens = self._schedule_prefill()
        if prefill_tokens:
            self._prefill_step(prefill_tokens)
        else:
            self._decode(until_s, max_steps)

    # Prefill.

    def _schedule_prefill(self) -> int:
        """Admit what fits; returns the prompt tokens that the next step may process."""
        limits = self._limits
        if not self.waiting and not self.prefilling:
            return 0
        decode_tokens = len(self.running) * (1 + self.k) if limits.chunked_prefill else 0
        budget = max(limits.max_batched_tokens - decode_tokens, 0)
        wanted = sum(sequence.prefill_left for sequence in self.prefilling)
        while (
            self.waiting
            and self.waiting[0].arrival_s <= self.now_s
            and len(self.running) + len(self.prefilling) < limits.max_num_seqs
            and (wanted < budget if limits.chunked_prefill else not wanted or wanted + self.waiting[0].prefill_left <= budget)
            and self._has_room(self.waiting[0])
        ):
            sequence = self.waiting.popleft()
            self._look_up(sequence)
            wanted += sequence.prefill_left
            self._reserved += sequence.context
            self.prefilling.append(sequence)
        return min(wanted, budget) if limits.chunked_prefill else wanted

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether the KV cache takes one more sequence and still leaves the running ones room to grow."""
        if not self.running and not self.prefilling:
            return True
        return self.kv_tokens + sequence.context + 1 <= (1.0 - WATERMARK) * self._limits.kv_capacity_tokens

    def _look_up(self, sequence: Sequence) -> None:
        if self._cache is None:
            return
        self._cache.shrink(self._limits.kv_capacity_tokens - self.kv_tokens)
        # At least one token is computed, since the last position's logits are needed.
        hit = min(self._cache.hit_tokens(sequence.prefix), sequence.prefill_left - 1)
        self.prefix_query_tokens += sequence.prefill_left
        self.prefix_hit_tokens += hit
        sequence.prefill_left -= hit
        if sequence.preemptions == 0:
            sequence.cached_tokens = hit

    def _prefill_step(self, tokens: int) -> None:
        decodes = bool(self.running) and self._limits.chunked_prefill
        if decodes:
            self._make_room()
        batch = len(self.running) if decodes else 0
        base, slope = step_cost(self.world, self.variant, self.k, batch=batch, prefill_tokens=tokens)
        self._tick(base + (slope * self._context if decodes else 0.0))
        if decodes:
            self._end_decode_step()
        left = tokens
        while left and self.prefilling:
            sequence = self.prefilling[0]
            part = min(left, sequence.prefill_left)
            sequence.prefill_left -= part
            left -= part
            if sequence.prefill_left:
                break
            self.prefilling.popleft()
            self._reserved -= sequence.context
            if self._cache is not None:
                self._cache.add(sequence.prefix)
            self._start(sequence)

    def _start(self, sequence: Sequence) -> None:
        """Prefill is complete: emit the first token (unless this was a recomputation) and begin to decode."""
        if sequence.first_token_s != sequence.first_token_s:  # not yet emitted
            sequence.first_token_s = sequence.last_token_s = self.now_s
            self.started.append(sequence)
        if sequence.done_steps == sequence.steps.count:
            self.finished.append(sequence)
            return
        sequence.started_at = len(self.step_end_s)
        sequence.finish_at = sequence.started_at + sequence.steps.count - sequence.done_steps
        self.running[sequence.index] = sequence
        heapq.heappush(self._heap, (sequence.finish_at, sequence.index, sequence))
        self._context += sequence.context
        self._growth += sequence.growth

    # Decode.

    def _decode(self, until_s: float, max_steps: int | None) -> None:
        count = self._make_room()
        batch = len(self.running)
        cost = self._costs.get(batch)
        if cost is None:
            cost = self._costs[batch] = step_cost(self.world, self.variant, self.k, batch=batch)
        count = min(count, self._next_finish() - len(self.step_end_s))
        if max_steps is not None:
            count = min(count, max_steps)
        base, slope = cost
        ends, context, growth, now = self.step_end_s, self._context, self._growth, self.now_s
        done = 0
        if self._steady:
            base, slope = base * self._run_factor, slope * self._run_factor
            if count >= LONG_RUN:
                contexts = np.add.accumulate(np.concatenate([[context], np.full(count, growth)]))
                times = np.add.accumulate(np.concatenate([[now], base + slope * contexts[:-1]]))[1:]
                done = min(int(np.searchsorted(times, until_s)) + 1, count)  # as the loop below would
                ends += times[:done].tolist()
                now, context = ends[-1], float(contexts[done])
                count = done
            while done < count:
                now += base + slope * context
                context += growth
                ends.append(now)
                done += 1
                if now >= until_s:
                    break
            self.now_s = now
        else:
            while done < count and self.now_s < until_s:
                self._tick(base + slope * context)
                context += growth
                ends.append(self.now_s)
                done += 1
        self.engine_steps += done
        self._context = context
        self._finish_due()

    def _end_decode_step(self) -> None:
        self.step_end_s.append(self.now_s)
        self.engine_steps += 1
        self._context += self._growth
        self._finish_due()

    def _tick(self, seconds: float) -> None:
        factor = self._run_factor * (1.0 + self._drift_per_s * self.now_s)
        if self._phase is not None and self._phase[0] <= self.now_s < self._phase[1]:
            factor *= self._phase[2]
        if not self._noisy:
            self.now_s += seconds * factor
            return
        if not self._noise:
            self._noise = self._draw_noise()
        noise, stall_s = self._noise.pop()
        self.now_s += seconds * factor * noise + stall_s

    def _draw_noise(self) -> list[tuple[float, float]]:
        """A factor of mean 1 and a stall in seconds, for each of the next steps."""
        noise = self.world.noise
        factors = np.exp(noise.step_sigma * self._rng.standard_normal(NOISE_BLOCK) - noise.step_sigma**2 / 2)
        if not noise.stall_share:
            return [(factor, 0.0) for factor in factors.tolist()]
        stalls = np.where(self._rng.random(NOISE_BLOCK) < noise.stall_share, noise.stall_s, 0.0)
        return list(zip(factors.tolist(), stalls.tolist(), strict=True))

    def _next_finish(self) -> int:
        """Decode step counter at which the next running sequence ends; entries of preempted ones are dropped."""
        heap = self._heap
        while heap[0][2].finish_at != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0]

    def _finish_due(self) -> None:
        step = len(self.step_end_s)
        heap = self._heap
        while heap and heap[0][0] <= step:
            finish_at, index, sequence = heapq.heappop(heap)
            if sequence.finish_at != finish_at:
                continue
            del self.running[index]
            self._leave(sequence)
            sequence.last_token_s = self.now_s
            self.finished.append(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Account for a sequence that stops running: finished, preempted or cancelled."""
        step = len(self.step_end_s)
        steps = step - sequence.started_at
        sequence.segments.append((sequence.started_at, step))
        sequence.done_steps += steps
        sequence.context += steps * sequence.growth
        sequence.finish_at = -1
        if self.running:
            self._context -= sequence.context
            self._growth -= sequence.growth
        else:
            self._context = self._growth = 0.0  # what rounding left

    def _make_room(self) -> int:
        """Decode steps that fit into the KV cache, at least 1: the youngest sequences are preempted until there is one."""
        capacity = self._limits.kv_capacity_tokens
        while self.kv_tokens + self._growth > capacity and len(self.running) > 1:
            _, sequence = self.running.popitem()
            self._leave(sequence)
            sequence.preemptions += 1
            self.preemptions += 1
            sequence.prefill_left = math.ceil(sequence.context)
            self.waiting.appendleft(sequence)
        room = capacity - self.kv_tokens
        return max(1, int(room / self._growth)) if self._growth > 0.0 else 1
