"""One gate from its first block to its verdict, whatever the blocks come from: live servers, a stored baseline, a simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from harness.gate.decide import LOOKS, confirming, decide
from harness.gate.statistics import Noise
from harness.gate.types import Block, Progress, Rules, Verdict


class OutOfTime(Exception):
    """A block was given up because what it took so far says that it would not end within the budget."""


class Source(Protocol):
    """Where blocks come from."""

    def block(self, number: int) -> Block:
        """Measure block `number` (from 0).

        Raises:
            OutOfTime: it would not end within the budget.
        """
        ...

    def elapsed_s(self) -> float:
        """Time used since the gate began, in the time that the budget is in."""
        ...


@dataclass(frozen=True, slots=True)
class GateRun:
    verdict: Verdict
    blocks: tuple[Block, ...]
    elapsed_s: float
    stopped_by: str  # decided, budget, blocks


def run_session(
    source: Source,
    rules: Rules,
    budget_s: float,
    note: Callable[[int, Verdict], None] = lambda _number, _verdict: None,
    known: Mapping[str, Noise] = MappingProxyType({}),
) -> GateRun:
    """Draw blocks until the gate is decided, or until no further block fits into the budget.

    A block is begun only where the longest one so far would still fit. `note` hears how things stand after each look. `known`
    is the noise of earlier gates, by metric.
    """
    blocks: list[Block] = []
    progress = Progress()
    longest_s = 0.0
    while True:
        begun_s = source.elapsed_s()
        try:
            blocks.append(source.block(len(blocks)))
            out_of_time = False
        except OutOfTime:
            out_of_time = True
        now_s = source.elapsed_s()
        longest_s = max(longest_s, now_s - begun_s)
        used = max(now_s / budget_s, len(blocks) / rules.max_blocks)
        out_of_time |= now_s + longest_s > budget_s
        last = out_of_time or len(blocks) >= rules.max_blocks
        if not last and not _look_due(used, len(blocks), progress, rules):
            continue
        step = decide(blocks, progress, 1.0 if last else used, rules, known)
        progress = step.progress
        note(len(blocks), step.verdict)
        if step.decided or last:
            stopped = "decided" if step.decided else "budget" if out_of_time else "blocks"
            return GateRun(step.verdict, tuple(blocks), now_s, stopped)


def _look_due(used: float, blocks: int, progress: Progress, rules: Rules) -> bool:
    """At the planned fractions of the budget, and when a confirmation is complete."""
    if progress.suspected_at is not None and not progress.cleared:
        return not confirming(blocks, progress)
    return any(progress.fraction < mark <= used for mark in LOOKS)
