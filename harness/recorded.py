"""Offline acceptance of a trace's recorded outputs, as the target's own tokenizer splits them."""

from __future__ import annotations

from pathlib import Path

from backends.reference.tokenizer import Tokenizer
from harness.context import prompt_ids
from harness.offline import Acceptance, ngram_acceptance, record, suffix_acceptance
from workloads.types import Trace


def offline_acceptance(trace: Trace, model: Path, *, max_k: int = 8) -> list[Acceptance]:
    """Exact n-gram and suffix acceptance for every K of 1..`max_k`, by category and context; empty without outputs."""
    tokenizer = Tokenizer(model)
    recorded = record(
        trace,
        lambda request: prompt_ids(request, tokenizer),
        lambda text: tokenizer.encode(text, special=False),
        tokenizer.end_id,
    )
    if not recorded:
        return []
    return [*ngram_acceptance(recorded, max_k=max_k), *suffix_acceptance(recorded, max_k=max_k)]
