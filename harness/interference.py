"""Long prompts that arrive while others decode: what does the decoding pay? Engines schedule this differently, so it is measured.

Some sequences decode; long prompts arrive; until the last of these has its first token, the prefill competes with the decoding.
The chunks of the decoding sequences before, during and after that time show who waits for whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from harness.types import RequestRecord

DECODE_FIRST, PREFILL_FIRST = 0.5, 0.1
"""Pace of decoding during the prefill, as a share of its pace before, from which decoding goes first and to which it waits."""

Order = Literal["decode first", "shared", "prefill first"]


@dataclass(frozen=True, slots=True)
class Interference:
    """Seconds per output token of the decoding sequences in three phases. None: no token, or no such phase."""

    decoders: int
    long_prompts: int
    long_prompt_tokens: float | None  # mean, as the server counted them
    tpot_before_s: float
    tpot_during_s: float | None  # None: not one token was decoded in it
    tpot_after_s: float | None
    largest_gap_before_s: float  # between two chunks of one sequence
    largest_gap_during_s: float
    pace_during_share: float  # tokens decoded during the prefill ÷ those the pace before would have given
    long_ttft_s: float  # until the last long prompt had its first token
    order: Order

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def interference(decoders: Sequence[RequestRecord], long: Sequence[RequestRecord]) -> Interference:
    """What the records of both kinds of requests show.

    Raises:
        ValueError: a request failed, or the decoding had ended before the long prompts came.
    """
    broken = [r for r in (*decoders, *long) if r.status != "completed" or r.first_token_s is None]
    if broken:
        raise ValueError(f"{len(broken)} of {len(decoders) + len(long)} requests did not complete ({broken[0].failure})")
    arrive = min(r.intended_s for r in long)
    prefilled = max(r.first_token_s for r in long if r.first_token_s is not None)
    begun = max(r.first_token_s for r in decoders if r.first_token_s is not None)
    before = _pace(decoders, begun, arrive)
    if not before or min(r.chunk_s[-1] for r in decoders) <= arrive:
        raise ValueError("the decoding had not begun, or had ended, when the long prompts came")
    during, after = _pace(decoders, arrive, prefilled), _pace(decoders, prefilled, float("inf"))
    share = min((during or 0.0) / before, 1.0)
    prompts = [r.input_tokens for r in long if r.input_tokens is not None]
    return Interference(
        decoders=len(decoders),
        long_prompts=len(long),
        long_prompt_tokens=float(np.mean(prompts)) if prompts else None,
        tpot_before_s=1 / before,
        tpot_during_s=1 / during if during else None,
        tpot_after_s=1 / after if after else None,
        largest_gap_before_s=_largest_gap(decoders, begun, arrive),
        largest_gap_during_s=_largest_gap(decoders, arrive, prefilled),
        pace_during_share=share,
        long_ttft_s=prefilled - arrive,
        order="decode first" if share >= DECODE_FIRST else "prefill first" if share <= PREFILL_FIRST else "shared",
    )


def _pace(records: Sequence[RequestRecord], begin: float, end: float) -> float | None:
    """Tokens per second of one sequence, over the time in the phase in which each was decoding; None without such time."""
    time = tokens = 0.0
    for record in records:
        low, high = max(begin, record.chunk_s[0]), min(end, record.chunk_s[-1])
        if high <= low:
            continue
        time += high - low
        sizes = record.chunk_tokens or (1,) * len(record.chunk_s)
        tokens += sum(n for at, n in zip(record.chunk_s, sizes, strict=True) if low < at <= high)
    return tokens / time if time else None


def _largest_gap(records: Sequence[RequestRecord], begin: float, end: float) -> float:
    """Largest gap between chunks of one sequence that overlaps the phase."""
    gaps = [
        later - earlier
        for record in records
        for earlier, later in zip(record.chunk_s, record.chunk_s[1:], strict=False)
        if later > begin and earlier < end
    ]
    return max(gaps, default=0.0)
