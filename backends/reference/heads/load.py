"""Reading a published draft head, whichever of the known layouts it has, and saying what had to be converted.

Layouts: EAGLE-1/2 and EAGLE-3 as SafeAILab, SpecForge (SGLang), vLLM and speculators write them; P-EAGLE; Medusa as
FasterDecoding and vLLM write it; MTP modules inside a target's own checkpoint (MiMo, DeepSeek-V3 naming over dense blocks) or as
speculators write them. Anything unknown is an error that names it: a head read wrongly still gives right text, only slowly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backends.reference.config import read_json, read_rope
from backends.reference.heads import layouts
from backends.reference.heads.block import Shape
from backends.reference.heads.eagle import Eagle
from backends.reference.heads.eagle3 import Eagle3, Eagle3Options
from backends.reference.heads.files import HeadFile, TargetWeights
from backends.reference.heads.medusa import Medusa
from backends.reference.heads.mtp import Mtp
from backends.reference.heads.p_eagle import PEagle
from backends.types import ConfigError

MASK_TOKEN_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
Raw = Mapping[str, Any]
Head = Eagle | Eagle3 | Medusa | Mtp | PEagle


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """`aux_layers`: the target's residual streams to capture, as blocks run before them (what `Decoder.forward` takes). `notes`: one
    line for each thing that was assumed or converted."""

    head: Head
    aux_layers: tuple[int, ...]
    notes: tuple[str, ...]


def load_head(
    folder: Path,
    target: TargetWeights,
    variant: str,
    *,
    dtype: torch.dtype = torch.float32,
    aux_ids_are_outputs: bool | None = None,
) -> LoadedHead:
    """The head in `folder`, in eval mode, for `variant` eagle2, eagle3, p_eagle, medusa or mtp.

    Args:
        target: the model it drafts for; embedding and LM head rows come from it where the head has none.
        aux_ids_are_outputs: how to read explicit auxiliary layer ids: True, block outputs counted from 0 (SGLang); False, blocks
            run before the stream (vLLM, speculators); None, by layout.

    Raises:
        ConfigError: another layout than the variant's, tensors that are missing, unknown or of an unexpected shape.
    """
    raw = read_json(folder / "config.json")
    reader = READERS.get(variant)
    if reader is None:
        raise ConfigError(f"no head of variant '{variant}' can be loaded: choose from {', '.join(READERS)}")
    prefix = _mtp_prefix(folder, raw, target) if variant == "mtp" else ""
    file = HeadFile(folder, prefix)
    notes: list[str] = []
    if file.pickled:
        notes.append(f"{file.pickled} was read without its pickled code; `tune.py train-head --export` writes safetensors")
    head, state = reader(file, raw, target, notes)
    file.finish()
    missing, unexpected = head.load_state_dict(state, strict=False)
    borrowed = {name for name in missing if name in BORROWED or name.startswith("heads.")}
    if set(missing) - borrowed or unexpected:  # our own tables disagree with our own modules
        raise AssertionError(f"{variant}: {missing}, {unexpected}")
    aux: tuple[int, ...] = ()
    if variant in ("eagle3", "p_eagle"):
        aux = aux_layers(raw, target.config.num_layers, notes, aux_ids_are_outputs)
        streams = (head.body if isinstance(head, PEagle) else head).options.streams
        if len(aux) != streams:
            raise ConfigError(f"{folder}: fc takes {streams} streams and {len(aux)} auxiliary layers {list(aux)} are given")
    return LoadedHead(head.to(dtype).eval(), aux, tuple(notes))


BORROWED = ("head.weight", "body.head.weight")


def aux_layers(raw: Raw, num_layers: int, notes: list[str], outputs: bool | None = None) -> tuple[int, ...]:
    """Auxiliary layers as blocks run before the stream.

    The same list means different layers in different engines: vLLM and speculators count blocks before the stream, SGLang (and what
    SpecForge writes for it) counts block outputs from 0, one less. Without a list all of them take 2, L // 2, L - 3.
    """
    nested = raw.get("eagle_config") or {}
    given = (
        raw.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids") or nested.get("layer_ids")
    )
    default = (2, num_layers // 2, num_layers - 3)
    ids = tuple(int(i) for i in given or default)
    if given and outputs is None:
        outputs = "speculators_model_type" not in raw and ids == tuple(i - 1 for i in default)
        if ids not in (default, tuple(i - 1 for i in default)) and "speculators_model_type" not in raw:
            notes.append(
                f"auxiliary layers {list(ids)} are read as vLLM reads them (blocks before the stream); if acceptance is near zero, "
                "they were meant as SGLang's block outputs"
            )
    if given and outputs:
        notes.append(
            f"auxiliary layers {list(ids)} are block outputs: the streams after {[i + 1 for i in ids]} blocks are used"
        )
        ids = tuple(i + 1 for i in ids)
    if any(not 0 <= i <= num_layers for i in ids) or list(ids) != sorted(set(ids)):
        raise ConfigError(
            f"auxiliary layers {list(ids)} do not fit a target of {num_layers} blocks: ascending numbers are needed"
        )
    return ids


def _shape(raw: Raw, folder: Path, target: TargetWeights) -> Shape:
    """Sizes of the head's blocks from its own configuration."""
    nested = raw.get("transformer_layer_config")
    layer: Raw = nested if isinstance(nested, Mapping) else raw
    path = folder / "config.json"
    try:
        hidden, heads = int(layer["hidden_size"]), int(layer["num_attention_heads"])
        return Shape(
            hidden=hidden,
            intermediate=int(layer["intermediate_size"]),
            heads=heads,
            kv_heads=int(layer.get("num_key_value_heads") or heads),
            head_dim=int(layer.get("head_dim") or hidden // heads),
            rms_eps=float(layer.get("rms_norm_eps", 1e-6)),
            rope=read_rope(layer, path),
            positions=target.config.context_tokens,
            target_hidden=int(raw.get("target_hidden_size") or target.config.hidden_size),
            vocab=target.config.vocab_size,
        )
    except KeyError as error:
        raise ConfigError(f"{path} has no field {error}") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _embedding(file: HeadFile, shape: Shape, target: TargetWeights, notes: list[str]) -> Tensor:
    own = file.optional("embed_tokens.weight", shape.vocab, shape.hidden)
    if own is not None:
        return own
    if shape.hidden != target.config.hidden_size:
        raise ConfigError(
            f"{file.folder} has no embed_tokens.weight, and the target's embedding is {target.config.hidden_size} wide where the "
            f"head needs {shape.hidden}"
        )
    notes.append("embedding: shared with the target")
    return target.embedding


def token_map(file: HeadFile, draft_vocab: int, vocab: int, notes: list[str]) -> Tensor:
    """The target's id of each draft id [draft_vocab]. `d2t` holds offsets: target id = draft id + d2t. A file that stores ids in
    their place is recognised by `t2d`, where there is one, or by offsets that leave the vocabulary."""
    d2t = file.optional("d2t", draft_vocab)
    t2d = file.optional("t2d", vocab)
    if d2t is None:
        if draft_vocab != vocab:
            raise ConfigError(f"{file.folder}: a draft vocabulary of {draft_vocab} of {vocab} tokens needs the map d2t")
        return torch.arange(vocab)
    offsets = d2t.long() + torch.arange(draft_vocab)
    kept = t2d.nonzero().flatten() if t2d is not None and bool(t2d.any()) else None
    for ids, note in ((offsets, None), (d2t.long(), "d2t holds token ids in this file, not offsets")):
        if kept is not None and not torch.equal(ids.sort().values, kept):
            continue
        if int(ids.min()) >= 0 and int(ids.max()) < vocab and ids.unique().numel() == draft_vocab:
            if note:
                notes.append(note)
            return ids
    raise ConfigError(
        f"{file.folder}: d2t gives no distinct token ids below {vocab}" + (" that agree with t2d" if kept is not None else "")
    )


def _read_eagle3(file: HeadFile, raw: Raw, target: TargetWeights, notes: list[str]) -> tuple[Eagle3, dict[str, Tensor]]:
    shape = _shape(raw, file.folder, target)
    options, names = _eagle3_options(file, raw, shape, notes)
    state = layouts.read(file, names)
    mapped = token_map(file, options.draft_vocab, shape.vocab, notes)
    head = Eagle3(shape, options, _embedding(file, shape, target, notes), mapped)
    state["head.weight"] = _lm_head(file, options.draft_vocab, shape, target, mapped, notes)
    return head, state


def _lm_head(file: HeadFile, rows: int, shape: Shape, target: TargetWeights, mapped: Tensor, notes: list[str]) -> Tensor:
    own = file.optional("lm_head.weight", rows, shape.hidden)
    if own is not None:
        return own
    if shape.hidden != target.config.hidden_size:
        raise ConfigError(f"{file.folder}: the weights lack tensor lm_head.weight")
    notes.append("LM head: the target's rows for the draft vocabulary")
    return target.output[mapped]


def _eagle3_options(file: HeadFile, raw: Raw, shape: Shape, notes: list[str]) -> tuple[Eagle3Options, layouts.Names]:
    first = "midlayer." if any(name.startswith("midlayer.") for name in file.names) else "layers.0."
    for number, name in enumerate(("low", "mid", "high")):  # SGLang's older spelling
        file.rename(f"aux_norm_{name}.", f"fc_norm.{number}.")
    nested = raw.get("eagle_config") or {}
    speculators = "speculators_model_type" in raw

    def flag(name: str, default: bool = False) -> bool:
        return bool(raw.get(name, nested.get(name, default)))

    width = file.width("fc.weight")
    if width % shape.target_hidden:
        raise ConfigError(
            f"{file.folder}: fc.weight takes {width} inputs, no multiple of the target's hidden size {shape.target_hidden}"
        )
    before = flag("norm_before_residual", speculators)
    if "norm_before_residual" not in raw:
        notes.append(f"norm_before_residual is not given: {before}, as {'speculators' if speculators else 'EAGLE'} has it")
    layers = max(file.count("layers."), 1) if first == "layers.0." else 1 + file.count("layers.")
    said = (raw.get("transformer_layer_config") or raw).get("num_hidden_layers")
    if said is not None and int(said) != layers:
        notes.append(f"the configuration says {said} blocks, the weights have {layers}: {layers} are used")
    options = Eagle3Options(
        streams=width // shape.target_hidden,
        layers=layers,
        draft_vocab=int(raw.get("draft_vocab_size") or (file.size("d2t") if "d2t" in file else shape.vocab)),
        norm_before_residual=before,
        norm_before_fc="input_norm.weight" in file,
        fc_norm="fc_norm.0.weight" in file,
        fc_bias="fc.bias" in file,
        norm_output=flag("norm_output"),
    )
    names = layouts.eagle3_names(
        shape,
        streams=options.streams,
        layers=layers,
        first=first,
        norm_before_fc=options.norm_before_fc,
        fc_norm=options.fc_norm,
        fc_bias=options.fc_bias,
    )
    return options, names


def _read_p_eagle(file: HeadFile, raw: Raw, target: TargetWeights, notes: list[str]) -> tuple[PEagle, dict[str, Tensor]]:
    nested = raw.get("dflash_config") or {}
    mask = next((int(c[key]) for c in (nested, raw) for key in MASK_TOKEN_KEYS if c.get(key) is not None), None)
    if mask is None:
        raise ConfigError(f"{file.folder}/config.json names no mask token: one of {', '.join(MASK_TOKEN_KEYS)} is needed")
    mask_hidden = file.take_flat("mask_hidden")
    mask_embedding = file.optional("mask_embedding", int(raw.get("hidden_size") or target.config.hidden_size))
    eagle3, state = _read_eagle3(file, raw, target, notes)
    shape, options = eagle3.shape, eagle3.options
    if mask_embedding is None:
        mask_embedding = eagle3.embedding[mask]
    head = PEagle(shape, options, eagle3.embedding, eagle3.token_map, mask_embedding)
    if mask_hidden.numel() != options.streams * shape.target_hidden:
        raise ConfigError(
            f"{file.folder}: tensor mask_hidden has {mask_hidden.numel()} values, fc takes {options.streams * shape.target_hidden}"
        )
    body = {f"body.{name}": tensor for name, tensor in state.items()}
    return head, body | {"mask_hidden": mask_hidden, "mask_embedding": mask_embedding}


def _read_eagle(file: HeadFile, raw: Raw, target: TargetWeights, notes: list[str]) -> tuple[Eagle, dict[str, Tensor]]:
    shape = _shape(raw, file.folder, target)
    if shape.hidden != target.config.hidden_size:
        raise ConfigError(
            f"{file.folder}: an EAGLE-1/2 head is as wide as its target, {target.config.hidden_size}, not {shape.hidden}"
        )
    file.rename("model.", "")
    layers, bias = max(file.count("layers."), 1), "fc.bias" in file
    state = layouts.read(file, layouts.eagle_names(shape, layers=layers, fc_bias=bias))
    if not bias:
        notes.append("fc has no bias")
    embedding = _embedding(file, shape, target, notes)
    return Eagle(shape, layers=layers, fc_bias=bias, embedding=embedding, output=target.output), state


def _read_medusa(file: HeadFile, raw: Raw, target: TargetWeights, notes: list[str]) -> tuple[Medusa, dict[str, Tensor]]:
    """FasterDecoding's names are {head}.{layer}.linear.* and {head}.{layers}.weight, vLLM's blocks.{head}.layers.{layer}.* and
    lm_heads.{head}.weight, or one lm_head.weight for all."""
    hidden, vocab = target.config.hidden_size, target.config.vocab_size
    file.rename("medusa_head.", "")
    published = "0.0.linear.weight" in file
    heads = file.count("" if published else "blocks.")
    said = raw.get("medusa_num_heads", raw.get("num_heads"))
    if said is not None and int(said) != heads:
        notes.append(f"the configuration says {said} heads, the weights have {heads}: {heads} are used")
    layers = file.count("0.") - 1 if published else file.count("blocks.0.layers.")
    state = {}
    for head in range(heads):
        for layer in range(layers):
            name = f"{head}.{layer}.linear" if published else f"blocks.{head}.layers.{layer}"
            state[f"blocks.{head}.{layer}.weight"] = file.take(f"{name}.weight", hidden, hidden)
            bias = file.optional(f"{name}.bias", hidden)
            state[f"blocks.{head}.{layer}.bias"] = torch.zeros(hidden) if bias is None else bias
    rows = int(raw.get("truncated_vocab_size") or vocab)
    mapped = file.optional("token_map", rows)
    mapped = torch.arange(vocab) if mapped is None else mapped.long()
    if published:
        outputs = [file.take(f"{head}.{layers}.weight", rows, hidden) for head in range(heads)]
    elif "lm_heads.0.weight" in file:
        outputs = [file.take(f"lm_heads.{head}.weight", rows, hidden) for head in range(heads)]
    elif "lm_head.weight" in file:
        outputs = [file.take("lm_head.weight", rows, hidden)]
    else:
        notes.append("LM head: the target's rows for the draft vocabulary, shared by all heads")
        outputs = [target.output[mapped]]
    return Medusa(hidden=hidden, heads=heads, layers=layers, outputs=outputs, token_map=mapped), state


def _mtp_prefix(folder: Path, raw: Raw, target: TargetWeights) -> str:
    if raw.get("speculators_model_type") == "mtp":
        return "mtp_layers."
    names = HeadFile(folder).names
    deepseek = f"model.layers.{target.config.num_layers}."
    prefix = next((p for p in ("model.mtp_layers.", deepseek) if any(name.startswith(p) for name in names)), None)
    if prefix is None:
        raise ConfigError(
            f"{folder} holds no MTP modules: expected tensors model.mtp_layers.0.* (MiMo) or {deepseek}* (DeepSeek-V3)"
        )
    return "model.layers." if prefix == deepseek else prefix


def _read_mtp(file: HeadFile, raw: Raw, target: TargetWeights, notes: list[str]) -> tuple[Mtp, dict[str, Tensor]]:
    """The order of the projection's input: MiMo (hidden, embedding); DeepSeek-V3 and speculators (embedding, hidden)."""
    speculators = raw.get("speculators_model_type") == "mtp"
    shape = _shape(raw, file.folder, target)
    deepseek = any(name.startswith("model.layers.") for name in file.names)
    first = target.config.num_layers if deepseek else 0
    prefix = "mtp_layers." if speculators else "model.layers." if deepseek else "model.mtp_layers."
    if deepseek:
        file.keep(lambda name: int(name.split(".")[2]) >= first)
        modules = len({name.split(".")[2] for name in file.names})
        for module in range(first, first + modules):  # copies of what the target has
            for name, width in (("embed_tokens.weight", shape.hidden), ("shared_head.head.weight", shape.hidden)):
                file.optional(f"{prefix}{module}.{name}", shape.vocab, width)
    else:
        modules = file.count(prefix)
    bias = f"{prefix}{first}.self_attn.q_proj.bias" in file
    norms = f"{prefix}{first}.self_attn.q_norm.weight" in file
    parts = layouts.DEEPSEEK if deepseek else layouts.MIMO
    names = layouts.mtp_names(shape, modules=modules, prefix=prefix, first=first, parts=parts, bias=bias, head_norms=norms)
    state = layouts.read(file, names)
    embedding_first = deepseek or speculators
    notes.append(f"MTP projection: ({'embedding, hidden' if embedding_first else 'hidden, embedding'}), as the layout has it")
    head = Mtp(
        shape,
        modules=modules,
        embedding_first=embedding_first,
        zero_first_embedding=not speculators,
        bias=bias,
        head_norms=norms,
        embedding=target.embedding,
        output=target.output,
    )
    return head, state


READERS: dict[str, Callable[[HeadFile, Raw, TargetWeights, list[str]], tuple[Any, dict[str, Tensor]]]] = {
    "eagle2": _read_eagle,
    "eagle3": _read_eagle3,
    "p_eagle": _read_p_eagle,
    "medusa": _read_medusa,
    "mtp": _read_mtp,
}
