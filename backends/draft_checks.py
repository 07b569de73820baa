"""Whether a draft checkpoint fits its target: shapes, layer ids, vocabulary maps, context, rope, declared base, limits of K."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from backends.checkpoint import Checkpoint, declared_base
from backends.findings import Finding
from backends.types import ConfigError, ServingConfig

HEADS = frozenset({"medusa", "eagle2", "eagle3", "p_eagle", "dflash", "dspark"})
"""Drafts that read the target's hidden states, and therefore exist for one target only."""

_USES_LAYER_IDS = frozenset({"eagle3", "p_eagle", "dflash", "dspark"})
_MASK_TOKEN_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "n_predict", "num_mtp_layers")
LOW_COVERAGE = 0.95


def check_hidden_size(target: Checkpoint, draft: Checkpoint) -> Iterator[Finding]:
    """A head declares the hidden size it was trained on, and its first projection shows it."""
    size = target.decoder.get("hidden_size")
    declared = draft.config.get("target_hidden_size") or draft.decoder.get("hidden_size")
    projection = draft.tensor("fc.weight")
    evidence = None
    if declared and size and declared != size:
        evidence = f"the head was made for hidden size {declared}, the target has {size}"
    elif projection is not None and size and projection.shape[-1] % int(size):
        evidence = f"the head's fc.weight takes {projection.shape[-1]} inputs, no multiple of the target's hidden size {size}"
    if evidence:
        action = "use a head that was trained for this target"
        yield Finding("error", "hidden_size", evidence, "the engine ends while loading, or drafts noise", action)


def check_layer_ids(target: Checkpoint, draft: Checkpoint, backend: str) -> Iterator[Finding]:
    """Layers of the target whose hidden states the head reads."""
    layers = target.decoder.get("num_hidden_layers")
    nested = draft.config.get("dflash_config") or draft.config.get("eagle_config") or {}
    source = {**draft.config, **nested}
    keys = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids", "dspark_target_layer_ids")
    ids = next((source[key] for key in keys if source.get(key)), None)
    if not ids or not layers:
        return
    if min(ids) < 0 or max(ids) > layers:
        yield Finding(
            "error",
            "layer_ids",
            f"the head reads layers {ids}, the target has {layers}",
            "the engine ends while loading",
            "use a head that was trained for this target",
        )
    elif backend == "sglang" and source.get("eagle_aux_hidden_state_layer_ids"):
        yield Finding(
            "warning",
            "layer_ids",
            f"the head names its layers {ids} itself",
            "SGLang reads the same ids one block later than vLLM for most models, and acceptance falls without any message",
            "compare first-position acceptance in both engines; a head without explicit ids is read alike by both",
        )


def check_draft_vocabulary(target: Checkpoint, draft: Checkpoint, outputs: Collection[str]) -> Iterator[Finding]:
    """`d2t` holds offsets (target id = draft id + offset), `t2d` flags of the same ids; and what the trace's outputs need."""
    d2t, t2d = draft.draft_map("d2t"), draft.draft_map("t2d")
    if d2t is None:
        return
    vocab_size = int(target.decoder.get("vocab_size", 0))
    ids = [index + offset for index, offset in enumerate(d2t)]
    fault = _map_fault(ids, t2d, vocab_size)
    if fault:
        consequence = "drafts are mapped to wrong target tokens, so that none is accepted"
        yield Finding("error", "draft_vocabulary", fault, consequence, "convert the head again, or use another")
        return
    if outputs and target.tokenizer is not None:
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(target.path / "tokenizer.json"))
        except Exception as error:  # tokenizers raises nothing narrower
            raise ConfigError(f"{target.path / 'tokenizer.json'} cannot be read: {error}") from None
        known = set(ids)
        tokens = [i for text in outputs for i in tokenizer.encode(text, add_special_tokens=False).ids]
        if tokens:
            coverage = sum(i in known for i in tokens) / len(tokens)
            yield Finding(
                "warning" if coverage < LOW_COVERAGE else "info",
                "draft_vocabulary",
                f"the draft vocabulary of {len(ids)} tokens holds {coverage:.1%} of the {len(tokens)} tokens the trace recorded as output",
                f"first-position acceptance cannot exceed {coverage:.2f} in greedy decoding",
                "expect this ceiling"
                if coverage >= LOW_COVERAGE
                else "use a head whose vocabulary was chosen on text like this",
                value=coverage,
            )


def _map_fault(ids: list[int], t2d: list[int] | None, vocab_size: int) -> str | None:
    if len(set(ids)) != len(ids):
        return f"d2t maps {len(ids)} draft tokens to {len(set(ids))} target tokens (does it hold ids instead of offsets?)"
    if ids and (min(ids) < 0 or (vocab_size and max(ids) >= vocab_size)):
        return f"d2t leads to token ids from {min(ids)} to {max(ids)}, the target has 0 to {vocab_size - 1}"
    if t2d is not None and {i for i, flag in enumerate(t2d) if flag} != set(ids):
        return f"t2d flags {sum(map(bool, t2d))} target tokens, d2t leads to {len(ids)} others"
    return None


def check_context(draft: Checkpoint, longest_tokens: int | None) -> Iterator[Finding]:
    """The draft's own position limit against the longest request."""
    limit = context_limit(draft.decoder)
    if limit and longest_tokens and longest_tokens > limit:
        yield Finding(
            "error",
            "context",
            f"the longest request has {longest_tokens} tokens, the draft {limit} positions",
            "the engine dies of it (an index outside the draft's rope table), or acceptance ends there",
            "use a draft with a longer context, or leave longer requests out with --window or --limit",
        )


def context_limit(decoder: Mapping[str, Any]) -> int | None:
    """Positions a model was made for; rope scaling extends the original number by its factor."""
    limit = decoder.get("max_position_embeddings")
    scaling = _rope(decoder)
    original = scaling.get("original_max_position_embeddings")
    if original and scaling.get("factor"):
        return max(int(limit or 0), round(original * scaling["factor"]))
    if limit and scaling.get("factor") and scaling.get("rope_type") in ("linear", "dynamic"):
        return round(limit * scaling["factor"])
    return int(limit) if limit else None


def check_rope(target: Checkpoint, draft: Checkpoint) -> Iterator[Finding]:
    """A head sees the target's positions, so that its rotary embedding must be the target's. (A model of its own has its own.)"""
    here, there = _rope(target.decoder), _rope(draft.decoder)
    if here != there:
        names = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
        shown = ", ".join(f"{name} {here.get(name)} and {there.get(name)}" for name in names)
        yield Finding(
            "warning",
            "rope",
            f"rope of target and head differ: {shown}",
            "acceptance falls with context length",
            "take the rope settings of the target over into the head's config.json, if it was trained with them",
        )


def _rope(decoder: Mapping[str, Any]) -> dict[str, Any]:
    """Rope settings under either of their names (`rope_parameters` holds theta as well), without what means "default"."""
    nested = decoder.get("rope_parameters") or decoder.get("rope_scaling") or {}
    rope = {"rope_theta": decoder.get("rope_theta", 10000.0), **nested}
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    return {key: float(value) if isinstance(value, int) else value for key, value in rope.items() if value != "default"}


def check_quantization(target: Checkpoint, draft: Checkpoint | None, config: ServingConfig) -> Iterator[Finding]:
    """What the checkpoints hold against what is asked for."""
    held = _quantization(target)
    asked = config.weight_quantization
    if asked in ("awq", "gptq", "compressed-tensors") and held is None:
        yield Finding(
            "error",
            "quantization",
            f"--quantization {asked} needs a checkpoint quantized so, {target.name} holds plain weights",
            "the engine ends while loading",
            f"give an {asked} checkpoint as --model, or quantize while loading (fp8)",
        )
    if draft is not None and config.variant in HEADS and (held or asked != "none") and not _quantization(draft):
        yield Finding(
            "info",
            "quantization",
            f"the target runs in {held or asked}, the head is not quantized",
            "the head sees other hidden states than it was trained on, and may accept less",
            "measure the unquantized target too",
        )


def _quantization(checkpoint: Checkpoint) -> str | None:
    settings = checkpoint.config.get("quantization_config")
    return str(settings.get("quant_method", "unnamed")) if isinstance(settings, Mapping) else None


def check_declared_base(target: Checkpoint, draft: Checkpoint) -> Iterator[Finding]:
    """The model that the draft says it was trained for. A name may differ for a copy, an architecture may not."""
    name, architectures = declared_base(draft)
    actual = tuple(target.config.get("architectures") or ())
    if architectures and actual and not set(architectures) & set(actual):
        yield Finding(
            "error",
            "base_model",
            f"the draft was trained for {', '.join(architectures)}, the target is {', '.join(actual)}",
            "it reads hidden states of another model: nothing is accepted",
            "use a draft trained for this target",
        )
    elif name and not _same_model(name, target):
        yield Finding(
            "warning",
            "base_model",
            f"the draft says it was trained for {name}, the target is {target.name}",
            "low acceptance, unless the target is a copy or a quantized form of that model",
            "check that both are the same model and version",
        )


def _same_model(name: str, target: Checkpoint) -> bool:
    """Equal last parts of the names, letters and digits alone; a target's longer name may add how it was quantized."""
    declared = _plain(name.rstrip("/").rpartition("/")[2])
    known = [target.name, str(target.path), str(target.config.get("_name_or_path") or "")]
    return any(declared in _plain(part) for part in known if part)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def check_k(target: Checkpoint, draft: Checkpoint | None, config: ServingConfig) -> Iterator[Finding]:
    """K that the draft's structure allows."""
    fault = None
    if config.variant == "mtp":
        holder = draft or target  # modules apart from the target's checkpoint, where the engine takes them
        layers = next((holder.decoder[key] for key in _MTP_KEYS if holder.decoder.get(key)), 0)
        if not layers:
            fault = f"{holder.name} has no multi-token-prediction layer ({', '.join(_MTP_KEYS[:2])})"
        elif config.k > layers and config.k % layers:
            fault = f"K = {config.k} is no multiple of the {layers} multi-token-prediction layers"
    elif draft is not None and config.variant == "medusa":
        heads = draft.config.get("medusa_num_heads") or draft.config.get("num_heads")
        if heads and config.k > heads:
            fault = f"K = {config.k}, the checkpoint has {heads} Medusa heads"
    elif draft is not None and config.variant in ("dflash", "dspark"):
        block = draft.config.get("block_size") or draft.config.get("dspark_block_size")
        if block and config.k > block:
            fault = f"K = {config.k}, the drafter was trained for blocks of {block}"
    if fault:
        yield Finding("error", "k", fault, "the engine ends while loading, or drafts noise beyond that", "choose another K")
    if config.variant == "p_eagle" and draft is not None and not _has_mask(draft):
        evidence = f"{draft.name} has neither a mask token ({', '.join(_MASK_TOKEN_KEYS)}) nor mask_hidden"
        action = "use it as eagle3, or a head trained for parallel drafting"
        yield Finding("error", "p_eagle", evidence, "it cannot draft in parallel: the engine ends while loading", action)


def _has_mask(draft: Checkpoint) -> bool:
    return draft.tensor("mask_hidden") is not None or any(draft.config.get(key) is not None for key in _MASK_TOKEN_KEYS)


def check_embedding_size(target: Checkpoint, draft: Checkpoint, config: ServingConfig) -> Iterator[Finding]:
    """Embeddings are often padded to a round size: allowed where the tokenizer is the same, and refused by some engines."""
    here, there = target.decoder.get("vocab_size"), draft.decoder.get("vocab_size")
    if not here or not there or here == there:
        return
    refused = config.backend == "vllm" and config.variant == "draft_model"
    refused = refused and not config.extra.get("speculative", {}).get("use_heterogeneous_vocab")
    yield Finding(
        "warning" if refused else "info",
        "vocabulary",
        f"embedding of {here} rows in the target and {there} in the draft with the same tokens: padding",
        "vLLM refuses unequal sizes" if refused else "the padded rows are never drafted or never accepted",
        "set speculative.use_heterogeneous_vocab, or pad the smaller embedding" if refused else "nothing to do",
    )
