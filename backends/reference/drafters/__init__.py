"""The table of variants: how each drafter is built. One entry here, and one file for each way of drafting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from backends.matchers import NgramIndex, SuffixIndex
from backends.reference.drafters.autoregressive import Autoregressive
from backends.reference.drafters.base import Drafter
from backends.reference.drafters.choice import Choice
from backends.reference.drafters.draft_model import DraftModel
from backends.reference.drafters.head_cache import Head, HeadCache, HeadKV
from backends.reference.drafters.lookup import Lookup
from backends.reference.drafters.medusa import MedusaHeads
from backends.reference.drafters.off import Off
from backends.reference.drafters.p_eagle import Parallel
from backends.reference.heads.block import borrow, with_linears
from backends.reference.heads.eagle import Eagle
from backends.reference.heads.eagle3 import Eagle3
from backends.reference.heads.files import read_target
from backends.reference.heads.load import LoadedHead, load_head
from backends.reference.heads.medusa import Medusa
from backends.reference.heads.mtp import Mtp
from backends.reference.heads.p_eagle import PEagle
from backends.reference.kv_cache import token_bytes
from backends.reference.loader import load_model
from backends.reference.model import Decoder
from backends.reference.options import SELF_INT4, EngineOptions
from backends.reference.quantization import LINEARS, weight_notes
from backends.reference.tokenizer import Tokenizer
from backends.types import ConfigError


@dataclass(frozen=True, slots=True)
class Built:
    """A drafter, the KV bytes it needs for each token of a sequence, and what was assumed when its checkpoint was read."""

    drafter: Drafter
    token_bytes: int = 0
    notes: tuple[str, ...] = ()


def build_drafter(options: EngineOptions, target: Decoder, tokenizer: Tokenizer, context: int) -> Built:
    """The drafter of `options.variant` for sequences of up to `context` tokens.

    Raises:
        ConfigError: a draft checkpoint that cannot work with this target.
    """
    return _BUILDERS[options.variant](options, target, tokenizer, context)


def _draft_model(options: EngineOptions, target: Decoder, tokenizer: Tokenizer, context: int) -> Built:
    rows = context + options.k
    if options.draft == SELF_INT4:
        if target.config.packing is not None:
            raise ConfigError(f"{SELF_INT4} drafts with an int4 copy, and {options.model} holds 4-bit weights itself")
        folder, quantization = options.model, "int4"
    else:
        folder, quantization = _folder(options), options.draft_quantization
        if Tokenizer(folder).vocabulary() != tokenizer.vocabulary():
            raise ConfigError(f"the draft {folder} has another tokenizer than the target {options.model}: token ids differ")
    model = load_model(folder, dtype=options.dtype, quantization=quantization, device=options.device, max_positions=rows)
    drafter = DraftModel(
        model,
        slots=options.max_num_seqs,
        rows=rows,
        stored=options.kv_cache_dtype,
        vocab_size=target.config.vocab_size,
        rule=options.sampling,
    )
    notes = weight_notes(quantization, model.config.packing, model.device, model.dtype)
    return Built(drafter, token_bytes(model.config, model.dtype, options.kv_cache_dtype), notes)


def _autoregressive(options: EngineOptions, target: Decoder, tokenizer: Tokenizer, context: int) -> Built:
    loaded = _load(options, target)
    head = loaded.head
    assert isinstance(head, Eagle | Eagle3 | Mtp)
    blocks = 1 if isinstance(head, Mtp) else len(head.blocks) if isinstance(head, Eagle) else 1 + len(head.rest)
    cache, used = _cache(options, target, head, blocks, context + options.k * options.topk)
    drafter = Autoregressive(
        head, cache, _choice(options, target, head), capture=loaded.aux_layers, topk=options.topk, nodes=options.draft_tokens
    )
    notes = loaded.notes
    if isinstance(head, Mtp) and len(head.modules_) > 1:
        notes += (f"of {len(head.modules_)} MTP modules the first drafts every token",)
    return Built(drafter, used, notes)


def _p_eagle(options: EngineOptions, target: Decoder, tokenizer: Tokenizer, context: int) -> Built:
    loaded = _load(options, target)
    head = loaded.head
    assert isinstance(head, PEagle)
    cache, used = _cache(options, target, head, 1 + len(head.body.rest), context + options.k)
    return Built(Parallel(head, cache, _choice(options, target, head), capture=loaded.aux_layers), used, loaded.notes)


def _medusa(options: EngineOptions, target: Decoder, tokenizer: Tokenizer, context: int) -> Built:
    loaded = _load(options, target)
    head = loaded.head
    assert isinstance(head, Medusa)
    if options.k > len(head.blocks):
        raise ConfigError(f"K = {options.k}, and {_folder(options)} has {len(head.blocks)} Medusa heads: each drafts one token")
    choice = _choice(options, target, head)
    drafter = MedusaHeads(head, choice, k=options.k, topk=options.topk, nodes=options.draft_tokens)
    return Built(drafter, notes=loaded.notes)


def _folder(options: EngineOptions) -> Path:
    """MTP modules may lie in the target's own checkpoint."""
    folder = options.model if options.draft is None else Path(options.draft)
    if not folder.is_dir():
        hint = f" (or give {SELF_INT4})" if options.variant == "draft_model" else ""
        raise ConfigError(f"draft directory {folder} does not exist{hint}")
    return folder


def _load(options: EngineOptions, target: Decoder) -> LoadedHead:
    """The head, sharing what it can with the target that runs, its linear layers packed or quantized."""
    weights = replace(read_target(options.model, target.dtype), embedding=target.embedding)
    if target.config.tied_embeddings:
        weights = replace(weights, output=target.embedding)
    loaded = load_head(_folder(options), weights, options.variant, dtype=target.dtype)
    head = loaded.head.to(target.device).requires_grad_(False)
    if isinstance(head, Eagle | Mtp):
        borrow(head, target.logits)
    with_linears(head, LINEARS[options.draft_quantization])
    notes = weight_notes(options.draft_quantization, None, target.device, target.dtype)
    return replace(loaded, notes=loaded.notes + notes)


def _cache(options: EngineOptions, target: Decoder, head: Head, blocks: int, rows: int) -> tuple[HeadCache, int]:
    shape = HeadKV(blocks, head.shape.kv_heads, head.shape.head_dim)
    slots, dtype, stored = options.max_num_seqs, target.dtype, options.kv_cache_dtype
    cache = HeadCache(head, shape, slots=slots, rows=rows, dtype=dtype, device=target.device, stored=stored)
    return cache, token_bytes(shape, dtype, stored)


def _choice(options: EngineOptions, target: Decoder, head: Head | Medusa) -> Choice:
    return Choice(target.config.vocab_size, head.token_map, options.sampling)


_BUILDERS: dict[str, Callable[[EngineOptions, Decoder, Tokenizer, int], Built]] = {
    "off": lambda *_: Built(Off()),
    "ngram": lambda options, *_: Built(Lookup(partial(NgramIndex, options.ngram_min, options.ngram_max))),
    "suffix": lambda *_: Built(Lookup(SuffixIndex)),
    "draft_model": _draft_model,
    "medusa": _medusa,
    "eagle2": _autoregressive,
    "eagle3": _autoregressive,
    "p_eagle": _p_eagle,
    "mtp": _autoregressive,
}
