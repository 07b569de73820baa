"""Two servers of one CPU measured at the same time: each on half of the cores, which they exchange many times a second.

On a shared host the speed of a core changes from second to second with what neighbours do, by more than any regression that matters.
Measured one after the other, two sides meet different seconds; measured at once they meet the same ones (Bulej et al. 2020, "Duet
Benchmarking: Improving Measurement Accuracy in the Cloud", ICPE). What hits one core alone still hits one side alone, unless neither
stays where it is: so the halves are exchanged faster than neighbours come and go.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from harness.environment import environment
from harness.gate.sides import Side

EXCHANGE_S = 0.1
"""A step or a few of a small model on a CPU; dozens of exchanges in a turn."""


@dataclass(frozen=True, slots=True)
class Duet:
    halves: tuple[tuple[int, ...], tuple[int, ...]]  # numbers of cores

    @property
    def threads(self) -> int:
        """How many threads a server computes with."""
        return len(self.halves[0])

    @property
    def method(self) -> str:
        return f"both sides at once, each on {self.threads} of {2 * self.threads} cores, exchanged every {EXCHANGE_S:.1f} s"

    async def exchange(self, pids: Sequence[int]) -> None:
        """Keep two processes and their children on one half each, and exchange the halves until cancelled.

        Threads that start meanwhile stay where the thread that started them was.
        """
        threads = [_threads(pid) for pid in pids]
        for halves in itertools.cycle((self.halves, self.halves[::-1])):
            for own, cores in zip(threads, halves, strict=True):
                for thread in own:
                    with contextlib.suppress(ProcessLookupError):  # it has ended
                        os.sched_setaffinity(thread, cores)
            await asyncio.sleep(EXCHANGE_S)


def duet_for(baseline: Side, candidate: Side) -> Duet | None:
    """None where a side is not a reference engine that is started here on a CPU; of others nobody knows whether they may be moved."""
    ours = all(side.url is None and side.backend == "reference" for side in (baseline, candidate))
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if not ours or len(cores) < 2 or environment()["gpu"]:
        return None
    half = len(cores) // 2
    return Duet((tuple(cores[:half]), tuple(cores[half : 2 * half])))


def _threads(pid: int) -> Sequence[int]:
    try:
        root = psutil.Process(pid)
        return [thread.id for process in (root, *root.children(recursive=True)) for thread in process.threads()]
    except psutil.NoSuchProcess:  # it died; the load will tell
        return ()
