"""A schedule of K by batch size, `extra["k_schedule"]` of a `ServingConfig`: [[first batch size, last batch size, K], ...].

Ranges are inclusive, start at 1 and ascend; K may be 0 (no speculation); a gap carries the K before it, and so does the open
end after the last range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backends.types import ServingConfig

FOLLOWED_BY = frozenset({"reference", "vllm", "sglang"})
"""Engines that change K with the batch size while they run; the others run with one K."""


def schedule_fault(config: ServingConfig) -> str | None:
    """Why the schedule of `config` is no such schedule, in one line; None where it is one or there is none."""
    return entries_fault(config.extra.get("k_schedule") or [], config.k)


def entries_fault(entries: Sequence[Any], most: int) -> str | None:
    """The same for bare entries; `most` is the configuration's K."""
    expected = 1
    for entry in entries:
        if not isinstance(entry, Sequence) or len(entry) != 3 or not all(isinstance(number, int) for number in entry):
            return f"K schedule entry {entry!r} is not [first batch size, last batch size, K]"
        first, last, k = entry
        if (expected == 1 and first != 1) or first < expected or last < first:
            return f"K schedule entry {list(entry)}: ranges start at batch size 1, ascend, and do not overlap"
        if not 0 <= k <= most:
            return f"K schedule entry {list(entry)}: K must lie between 0 and the configuration's K = {most}"
        expected = last + 1
    return None


def ranges(config: ServingConfig) -> list[tuple[int, int, int]]:
    """The schedule without gaps, neighbours of equal K joined: [(first, last, K), ...]; empty where there is none."""
    out: list[tuple[int, int, int]] = []
    for first, last, k in config.extra.get("k_schedule") or []:
        if out:
            before = out.pop()
            out.append((before[0], first - 1, before[2]))
        if out and out[-1][2] == k:
            out.append((out.pop()[0], last, k))
        else:
            out.append((first, last, k))
    return out


def k_at(entries: Sequence[tuple[int, int, int]], batch: int, default: int) -> int:
    """K of `batch` sequences decoded together; `default` without a schedule."""
    return max((entry for entry in entries if entry[0] <= batch), default=(0, 0, default))[2]
