"""Who takes part in the next step: continuous batching under a cap on sequences, a token budget and a KV capacity."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from backends.k_schedule import k_at
from backends.reference.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """`step_tokens` bounds prompt tokens plus one for each decoding sequence. Drafts are not counted, so that speculation does
    not change how prompts are cut. `capacity_tokens` bounds the KV rows of all running sequences, `draft_rows` for each
    included. `k` is the deepest draft, `k_schedule` what it is at which batch size."""

    max_num_seqs: int
    step_tokens: int
    capacity_tokens: int
    chunked_prefill: bool
    k: int
    draft_rows: int
    k_schedule: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Next step: prompts as (sequence, how many of its tokens), decoding sequences as (sequence, most draft tokens)."""

    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    decodes: list[tuple[Sequence, int]] = field(default_factory=list)


TakeOver = Callable[[Sequence, int, int], int]
"""(sequence that was just given a slot, a slot, how many first tokens that one's KV rows have in common with it) -> how many
tokens it need not compute."""


class Scheduler:
    """First come, first served. With chunked prefill prompts fill what decoding leaves of the budget; without it whole prompts
    go first, in steps of their own, and decoding waits."""

    def __init__(self, limits: Limits, take_over: TakeOver) -> None:
        self.limits = limits
        self._take_over = take_over
        self._held: dict[int, list[int]] = {}  # free slot -> the tokens whose rows it still has
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self._free_slots = list(range(limits.max_num_seqs))

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> tuple[Plan, list[Sequence]]:
        """The next step, and the sequences that had to give up their KV rows for it (they are waiting again)."""
        preempted = self._preempt()
        if self.limits.chunked_prefill:
            decodes = self._decodes()
            return Plan(self._chunks(self.limits.step_tokens - len(decodes)), decodes), preempted
        prefills = self._whole_prompts()
        return Plan(prefills, [] if prefills else self._decodes()), preempted

    def release(self, sequence: Sequence) -> None:
        """Take a finished or cancelled sequence out."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
        else:
            self._vacate(sequence)

    def forget_prefixes(self) -> None:
        """Let nothing that has finished be taken over by later prompts."""
        self._held.clear()

    def _decodes(self) -> list[tuple[Sequence, int]]:
        decoding = [s for s in self.running if s.decoding]
        k = k_at(self.limits.k_schedule, len(decoding), self.limits.k)
        return [(s, max(0, min(k, s.draft_room))) for s in decoding]

    def _chunks(self, budget: int) -> list[tuple[Sequence, int]]:
        chunks = []
        for sequence in self.running:
            if budget > 0 and not sequence.decoding:
                chunks.append((sequence, min(budget, sequence.pending)))
                budget -= chunks[-1][1]
        while budget > 0 and self._can_admit():
            sequence = self._admit()
            chunks.append((sequence, min(budget, sequence.pending)))
            budget -= chunks[-1][1]
        return chunks

    def _whole_prompts(self) -> list[tuple[Sequence, int]]:
        prompts: list[tuple[Sequence, int]] = []
        budget = self.limits.step_tokens
        while self._can_admit() and (not prompts or self.waiting[0].pending <= budget):
            sequence = self._admit()
            prompts.append((sequence, sequence.pending))
            budget -= sequence.pending
        return prompts

    def _can_admit(self) -> bool:
        if not self.waiting or not self._free_slots:
            return False
        return sum(map(self._rows, self.running)) + self._rows(self.waiting[0]) <= self.limits.capacity_tokens

    def _admit(self) -> Sequence:
        sequence = self.waiting.popleft()
        slot, common = self._longest_prefix(sequence.tokens[:-1])  # the last token's hidden state is always needed
        sequence.slot = heapq.heappop(self._free_slots)
        self.running.append(sequence)
        sequence.computed = self._take_over(sequence, slot, common)
        self._held.pop(sequence.slot, None)
        return sequence

    def _longest_prefix(self, tokens: list[int]) -> tuple[int, int]:
        """A slot whose rows have most first tokens in common with `tokens`, and how many."""
        rows = [*self._held.items(), *((s.slot, s.tokens[: s.computed]) for s in self.running)]
        return max(((slot, _common(tokens, held)) for slot, held in rows), key=lambda item: item[1], default=(0, 0))

    def _preempt(self) -> list[Sequence]:
        """Last admitted, first out; its tokens are kept and recomputed later. One sequence alone always fits."""
        preempted = []
        while sum(map(self._rows, self.running)) > self.limits.capacity_tokens:
            sequence = self.running[-1]
            self._vacate(sequence)
            self.waiting.appendleft(sequence)
            preempted.append(sequence)
        return preempted

    def _vacate(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        heapq.heappush(self._free_slots, sequence.slot)
        self._held[sequence.slot] = sequence.tokens[: sequence.computed]
        sequence.slot, sequence.computed = -1, 0

    def _rows(self, sequence: Sequence) -> int:
        return len(sequence.tokens) + self.limits.draft_rows


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix, by bisection over slices, which compare fast."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
