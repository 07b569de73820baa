"""The table of drafters: one entry here and one file for each variant."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from backends.matchers import NgramIndex, SuffixIndex
from backends.reference.drafters.base import Drafter
from backends.reference.drafters.draft_model import DraftModel
from backends.reference.drafters.lookup import Lookup
from backends.reference.drafters.off import Off
from backends.reference.kv_cache import token_bytes
from backends.reference.loader import load_model
from backends.reference.options import SELF_INT4, EngineOptions
from backends.reference.tokenizer import Tokenizer
from backends.types import ConfigError

Built = tuple[Drafter, int]
"""A drafter and the KV bytes it needs for each token of a sequence."""


def build_drafter(options: EngineOptions, tokenizer: Tokenizer, vocab_size: int, rows: int) -> Built:
    """The drafter of `options.variant`; `rows` is the KV rows of a slot, `vocab_size` the target's.

    Raises:
        ConfigError: a draft checkpoint that cannot work with this target.
    """
    return _BUILDERS[options.variant](options, tokenizer, vocab_size, rows)


def _draft_model(options: EngineOptions, tokenizer: Tokenizer, vocab_size: int, rows: int) -> Built:
    if options.draft == SELF_INT4:
        folder, quantization = options.model, "int4"
    else:
        folder, quantization = Path(str(options.draft)), options.draft_quantization
        if not folder.is_dir():
            raise ConfigError(f"draft model directory {folder} does not exist (or give {SELF_INT4})")
        if Tokenizer(folder).vocabulary() != tokenizer.vocabulary():
            raise ConfigError(f"the draft {folder} has another tokenizer than the target {options.model}: token ids differ")
    model = load_model(folder, dtype=options.dtype, quantization=quantization, device=options.device, max_positions=rows)
    drafter = DraftModel(
        model, slots=options.max_num_seqs, rows=rows, vocab_size=vocab_size, rejection=options.sampling == "rejection"
    )
    return drafter, token_bytes(model.config, model.dtype)


_BUILDERS: dict[str, Callable[[EngineOptions, Tokenizer, int, int], Built]] = {
    "off": lambda options, tokenizer, vocab_size, rows: (Off(), 0),
    "ngram": lambda options, tokenizer, vocab_size, rows: (
        Lookup(partial(NgramIndex, options.ngram_min, options.ngram_max)),
        0,
    ),
    "suffix": lambda options, tokenizer, vocab_size, rows: (Lookup(SuffixIndex), 0),
    "draft_model": _draft_model,
}
