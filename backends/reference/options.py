"""Everything that decides how the engine runs, and the checks that need no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backends.k_schedule import entries_fault
from backends.matchers import DEFAULT_MAX_N, DEFAULT_MIN_N
from backends.types import ConfigError

VARIANTS = ("off", "ngram", "suffix", "draft_model")
QUANTIZATIONS = ("none", "int8", "int4")
SELF_INT4 = "self-int4"
"""A `draft` that is the target's own int4 copy."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`draft` is a model directory, or `self-int4`. `max_model_len`, `kv_cache_tokens` None: what model and memory allow.

    `forced_acceptance` [K] makes draft position i accepted in that share of the decode steps, whatever was drafted: step costs can
    then be measured on any text, and the text is worthless. `step_log` gets one JSON line a step.
    """

    model: Path
    variant: str = "off"
    k: int = 0
    draft: str | None = None
    draft_quantization: str = "none"
    quantization: str = "none"
    dtype: str = "auto"
    device: str = "cpu"
    sampling: str = "coupled"  # or rejection: see verify.py
    max_num_seqs: int = 64
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    chunked_prefill: bool = True
    kv_cache_tokens: int | None = None
    ngram_min: int = DEFAULT_MIN_N
    ngram_max: int = DEFAULT_MAX_N
    k_schedule: tuple[tuple[int, int, int], ...] = ()  # (first batch size, last, K): see backends/k_schedule.py
    forced_acceptance: tuple[float, ...] = ()
    step_log: Path | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for settings that contradict each other or themselves."""
        for name, known in (("variant", VARIANTS), ("quantization", QUANTIZATIONS), ("draft_quantization", QUANTIZATIONS)):
            if getattr(self, name) not in known:
                raise ConfigError(f"unknown {name} '{getattr(self, name)}': choose from {', '.join(known)}")
        if self.sampling not in ("coupled", "rejection"):
            raise ConfigError(f"unknown sampling '{self.sampling}': choose coupled or rejection")
        if (self.variant == "off") != (self.k == 0) or self.k < 0:
            raise ConfigError(f"variant '{self.variant}' with K = {self.k}: off has K = 0, every other variant K >= 1")
        if (self.variant == "draft_model") != (self.draft is not None):
            raise ConfigError("--draft goes with --variant draft_model: a model directory, or self-int4")
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
