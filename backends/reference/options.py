"""Everything that decides how the engine runs, and the checks that need no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backends.k_schedule import entries_fault
from backends.matchers import DEFAULT_MAX_N, DEFAULT_MIN_N
from backends.types import NEEDS_DRAFT, ConfigError

VARIANTS = ("off", "ngram", "suffix", "draft_model", "medusa", "eagle2", "eagle3", "p_eagle", "mtp")
TREES = frozenset({"medusa", "eagle2", "eagle3", "mtp"})
"""Variants that draft trees where `topk` is above 1."""

QUANTIZATIONS = ("none", "int8", "int4", "fp8")
KV_CACHE_DTYPES = ("auto", "fp8", "int8")
"""What keys and values are stored as; `auto` is the model's dtype. fp8 is e4m3."""

SAMPLINGS = ("coupled", "rejection", "block")
FP8_EMULATED = "fp8 is emulated: the text and what is accepted are those of e4m3, step costs are not"
SELF_INT4 = "self-int4"
"""A `draft` that is the target's own int4 copy."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`draft` is the directory of a model or head, or `self-int4`; `mtp` without one takes the modules in the target's own
    checkpoint. `max_model_len`, `kv_cache_tokens` None: what model and memory allow.

    `kv_cache_dtype` goes for the target's cache and for the drafter's, whatever has one.

    `topk` above 1 drafts a tree of depth `k`; `num_draft_tokens` nodes of it are verified, the root (the last token) included.

    `forced_acceptance` [K] makes draft position i accepted in that share of the decode steps, whatever was drafted: step costs can
    then be measured on any text, and the text is worthless. `step_log` gets one JSON line a step.
    """

    model: Path
    variant: str = "off"
    k: int = 0
    topk: int = 1
    num_draft_tokens: int | None = None
    draft: str | None = None
    draft_quantization: str = "none"
    quantization: str = "none"
    dtype: str = "auto"
    device: str = "cpu"
    sampling: str = "coupled"  # or rejection, block: see verify.py
    max_num_seqs: int = 64
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    chunked_prefill: bool = True
    prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    kv_cache_tokens: int | None = None
    ngram_min: int = DEFAULT_MIN_N
    ngram_max: int = DEFAULT_MAX_N
    k_schedule: tuple[tuple[int, int, int], ...] = ()  # (first batch size, last, K): see backends/k_schedule.py
    forced_acceptance: tuple[float, ...] = ()
    step_log: Path | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for settings that contradict each other or themselves."""
        for name, known in (
            ("variant", VARIANTS),
            ("quantization", QUANTIZATIONS),
            ("draft_quantization", QUANTIZATIONS),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("sampling", SAMPLINGS),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"unknown {name} '{getattr(self, name)}': choose from {', '.join(known)}")
        if (self.variant == "off") != (self.k == 0) or self.k < 0:
            raise ConfigError(f"variant '{self.variant}' with K = {self.k}: off has K = 0, every other variant K >= 1")
        if self.draft is None and self.variant in NEEDS_DRAFT:
            raise ConfigError(
                f"variant {self.variant} needs --draft: a directory" + ", or self-int4" * (self.variant == "draft_model")
            )
        if self.draft is not None and self.variant not in NEEDS_DRAFT | {"mtp"}:
            raise ConfigError(f"variant {self.variant} takes no --draft")
        if fault := tree_fault(self.variant, self.k, self.topk, self.num_draft_tokens):
            raise ConfigError(fault)
        if self.draft == SELF_INT4 and self.draft_quantization not in ("none", "int4"):
            raise ConfigError(
                "self-int4 is an int4 copy: leave --draft-quantization out, or give the model directory as --draft"
            )
        if fault := entries_fault(self.k_schedule, self.k):
            raise ConfigError(fault)
        rates = self.forced_acceptance
        if rates and (
            len(rates) != self.k or not all(0 <= rate <= 1 for rate in rates) or sorted(rates, reverse=True) != [*rates]
        ):
            raise ConfigError(
                f"--forced-acceptance {rates}: {self.k} rates of 0 to 1, one a draft position, none above the one before"
            )
        if not 1 <= self.ngram_min <= self.ngram_max:
            raise ConfigError(f"--ngram-min {self.ngram_min} and --ngram-max {self.ngram_max}: 1 <= min <= max is needed")
        if self.max_num_seqs < 1:
            raise ConfigError(f"--max-num-seqs {self.max_num_seqs}: at least 1")
        if self.chunked_prefill and self.max_num_batched_tokens <= self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} leaves prompts no room beside "
                f"{self.max_num_seqs} decoding sequences: raise it above --max-num-seqs"
            )

    @property
    def draft_tokens(self) -> int:
        """Most tokens drafted for one sequence in one step."""
        return self.k if self.topk == 1 else (self.num_draft_tokens or 1) - 1


def tree_fault(variant: str, k: int, topk: int, num_draft_tokens: int | None) -> str | None:
    """Why there is no such tree, in one line; None if there is."""
    if topk == 1:
        if num_draft_tokens not in (None, k + 1):
            return f"{num_draft_tokens} draft tokens with topk 1: a chain has K + 1 = {k + 1}, the last token included"
        return None
    if topk < 1:
        return f"topk {topk}: at least 1"
    if variant not in TREES:
        return f"{variant} drafts chains: topk must be 1"
    most = 1 + topk + (k - 1) * topk * topk
    if num_draft_tokens is None or not k + 1 <= num_draft_tokens <= most:
        return f"a tree with topk {topk} and K = {k} needs num_draft_tokens from {k + 1} to {most}, the last token included"
    return None
