"""Discrete-event run in virtual time: what every request would see, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.simulated.acceptance import Acceptance, ExpectedAcceptance
from backends.simulated.scheduler import Scheduler, Sequence
from backends.simulated.world import World
from backends.types import ConfigError, SpecCounters

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    arrival_s: float  # ignored in closed loop
    input_tokens: int
    output_tokens: int
    category: str | None = None
    prefix: tuple[int, ...] = ()  # ids of its prompt's blocks of `Limits.kv_block_tokens`, each standing for all before it too


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What happened, by request in the order given. All times are seconds in virtual time."""

    sent_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    output_tokens: Ints
    decode_steps: Ints
    cached_tokens: Ints
    preemptions: Ints
    counters: SpecCounters
    sequences: tuple[Sequence, ...]
    step_end_s: Floats  # end of every decode step

    @property
    def ttft_s(self) -> Floats:
        return self.first_token_s - self.sent_s

    @property
    def e2e_s(self) -> Floats:
        return self.last_token_s - self.sent_s

    @property
    def tpot_s(self) -> Floats:
        """(last − first) ÷ (tokens − 1); NaN for one token."""
        gaps = np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)
        return (self.last_token_s - self.first_token_s) / gaps

    @property
    def output_tokens_per_s(self) -> float:
        return float(self.output_tokens.sum() / (self.last_token_s.max() - self.sent_s.min()))

    @property
    def mean_batch(self) -> float:
        """Sequences in a decode step, on average."""
        return float(self.decode_steps.sum() / max(len(self.step_end_s), 1))

    def chunks(self, index: int) -> tuple[Floats, list[int]]:
        """When the chunks of one request were emitted, and how many tokens each held (the first token's chunk included)."""
        sequence = self.sequences[index]
        ends = [self.step_end_s[a:b] for a, b in sequence.segments]
        times = np.concatenate([[sequence.first_token_s], *ends])
        return times, [1, *sequence.steps.emitted(sequence.output_tokens - 1)]


def simulate(
    world: World,
    requests: Ordered[SimulatedRequest],
    *,
    variant: str = "off",
    k: int = 0,
    concurrency: int | None = None,
    seed: int = 0,
    luck: bool = True,
) -> SimulatedRun:
    """Run all requests to their end.

    Open loop at the requests' own arrivals (which must not decrease), or, with `concurrency`, closed loop: so many at a time,
    the next one sent when one ends. Equal arguments give equal results. Without `luck` every request takes its expected number of
    decode steps: what a prediction wants. Accepted and drafted tokens are then not counted.

    Raises:
        ConfigError: the world lacks the variant, a request can never be served, or arrivals decrease.
    """
    reason = world.check(variant, k)
    if reason:
        raise ConfigError(reason)
    scheduler = Scheduler(world, variant, k, seed)
    draft = world.drafts.get(variant)
    sequences = _sequences(requests, scheduler, Acceptance(draft, k, seed) if luck else ExpectedAcceptance(draft, k))
    if concurrency is None:
        _check_arrivals(requests)
        _open_loop(scheduler, sequences)
    else:
        _closed_loop(scheduler, sequences, concurrency)
    return _result(scheduler, sequences)


def _sequences(
    requests: Ordered[SimulatedRequest], scheduler: Scheduler, acceptance: Acceptance | ExpectedAcceptance
) -> list[Sequence]:
    sequences = []
    for index, request in enumerate(requests):
        reason = scheduler.refuses(request.input_tokens, request.output_tokens)
        if reason or request.input_tokens < 1 or request.output_tokens < 1:
            raise ConfigError(f"request {index}: {reason or 'needs at least one input and one output token'}")
        steps = acceptance.steps(request.output_tokens - 1, request.category)
        sequences.append(
            Sequence(
                index,
                request.arrival_s,
                input_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
                steps=steps,
                prefix=request.prefix,
            )
        )
    return sequences


def _check_arrivals(requests: Ordered[SimulatedRequest]) -> None:
    earlier = 0.0
    for index, request in enumerate(requests):
        if request.arrival_s < earlier:
            raise ConfigError(f"request {index} arrives at {request.arrival_s} s, before the one in front of it")
        earlier = request.arrival_s


def _open_loop(scheduler: Scheduler, sequences: list[Sequence]) -> None:
    count, sent = len(sequences), 0
    while sent < count or scheduler.busy:
        if not scheduler.busy:
            scheduler.submit(sequences[sent])
            sent += 1
        while sent < count and sequences[sent].arrival_s <= scheduler.now_s:
            scheduler.submit(sequences[sent])
            sent += 1
        if sent < count:
            scheduler.step(sequences[sent].arrival_s)
        else:
            scheduler.step()


def _closed_loop(scheduler: Scheduler, sequences: list[Sequence], concurrency: int) -> None:
    sent = min(concurrency, len(sequences))
    for sequence in sequences[:sent]:
        sequence.arrival_s = 0.0
        scheduler.submit(sequence)
    while scheduler.busy:
        scheduler.step()
        for sequence in sequences[sent : sent + len(scheduler.finished)]:
            sequence.arrival_s = scheduler.now_s
            scheduler.submit(sequence)
            sent += 1


def _result(scheduler: Scheduler, sequences: list[Sequence]) -> SimulatedRun:
    outputs = np.array([s.output_tokens for s in sequences], dtype=np.int64)
    steps = np.array([s.steps.count for s in sequences], dtype=np.int64)
    k = scheduler.k
    drafted = sum(s.steps.drafted for s in sequences)
    accepted = np.zeros(k + 1, dtype=np.int64)
    if k and sequences:
        every = np.concatenate([s.steps.accepted for s in sequences if s.steps.accepted is not None] or [np.empty(0, np.uint8)])
        accepted = np.bincount(every, minlength=k + 1)
    per_position = np.cumsum(accepted[::-1])[::-1][1:]  # steps in which at least i were accepted
    counters = SpecCounters(
        generated_tokens=int(outputs.sum()),
        first_tokens=len(sequences),
        decode_steps=int(steps.sum()),
        drafted_steps=drafted,
        draft_tokens=drafted * k,
        accepted_tokens=int(per_position.sum()),
        accepted_per_position=tuple(int(n) for n in per_position),
        prompt_tokens=sum(s.input_tokens for s in sequences),
        prefix_hit_tokens=scheduler.prefix_hit_tokens,
        prefix_query_tokens=scheduler.prefix_query_tokens,
        preemptions=scheduler.preemptions,
        engine_steps=len(scheduler.step_end_s),
    )
    return SimulatedRun(
        sent_s=np.array([s.arrival_s for s in sequences]),
        first_token_s=np.array([s.first_token_s for s in sequences]),
        last_token_s=np.array([s.last_token_s for s in sequences]),
        output_tokens=outputs,
        decode_steps=steps,
        cached_tokens=np.array([s.cached_tokens for s in sequences], dtype=np.int64),
        preemptions=np.array([s.preemptions for s in sequences], dtype=np.int64),
        counters=counters,
        sequences=tuple(sequences),
        step_end_s=np.array(scheduler.step_end_s),
    )
