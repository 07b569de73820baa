"""Writing a trained head: whole in its published layout (bf16, for any engine), or small (int8 blocks, the rest from the target)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from backends.reference.config import read_json
from backends.reference.heads import layouts
from backends.reference.heads.block import Shape
from backends.reference.heads.files import SCALE, HeadFile, TargetWeights
from backends.reference.quantization.int8 import to_int8

MASK_EMBEDDING = "mask_embedding"
"""P-EAGLE's one trained embedding row: in the published layout it stands in a copy of the whole embedding."""
WHOLE_MODELS = ("mtp", "draft_model")
State = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Published:
    """What training made, under published names. Its target's part is `borrowed`."""

    own: State
    config: dict[str, Any]


def published(variant: str, state: State, shape: Shape, token_map: Tensor, target: TargetWeights, mask_token: int) -> Published:
    """Names and configuration that vLLM (and SGLang, where it has the variant) loads."""
    base = _layer_config(target.folder)
    return WRITERS[variant](state, shape, token_map, target, base, mask_token)


def write_small(folder: Path, head: Published) -> None:
    """Matrices as int8 with a scale for each row, vectors in bf16, nothing of the target."""
    tensors: State = {}
    for name, tensor in head.own.items():
        if tensor.dim() == 2 and tensor.is_floating_point() and min(tensor.shape) > 1:
            tensors[name], scale = to_int8(tensor)
            tensors[f"{name}{SCALE}"] = scale.flatten()
        else:
            tensors[name] = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
    _write(folder, tensors, head.config)


def round_int8(weight: Tensor) -> Tensor:
    """What is left of a matrix after int8."""
    q, scale = to_int8(weight)
    return q * scale


def write_published(folder: Path, variant: str, head: Published, target: TargetWeights) -> None:
    """Everything in bf16; a head that is a model, or lives in its target's checkpoint, comes with the target's tokenizer."""
    tensors = {name: tensor for name, tensor in head.own.items() if name != MASK_EMBEDDING} | borrowed(variant, head, target)
    tensors = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    if variant in WHOLE_MODELS:
        for path in target.folder.glob("*.json"):
            if path.name not in ("config.json", "model.safetensors.index.json"):
                shutil.copy(path, folder / path.name)
    _write(folder, tensors, head.config)


def expand(folder: Path, variant: str, small: Path, target: TargetWeights) -> None:
    """The published layout of a head kept small."""
    write_published(folder, variant, Published(HeadFile(small).all(), read_json(small / "config.json")), target)


def borrowed(variant: str, head: Published, target: TargetWeights) -> State:
    """What the published layout repeats of the target."""
    own, config = head.own, head.config
    if variant == "eagle2":
        return {}
    if variant == "medusa":
        return {"lm_head.weight": target.output[own["token_map"].long()]}
    if variant == "draft_model":
        head_rows = {} if target.config.tied_embeddings else {"lm_head.weight": target.output}
        return {"model.embed_tokens.weight": target.embedding} | head_rows
    if variant == "mtp":
        return _zero_biases(config) | _all_tensors(target.folder)
    rows = {"lm_head.weight": target.output[own["d2t"] + torch.arange(len(own["d2t"]))]}
    if variant == "p_eagle":
        rows["embed_tokens.weight"] = target.embedding.clone()
        rows["embed_tokens.weight"][config["mask_token_id"]] = own[MASK_EMBEDDING].to(target.embedding.dtype)
    return rows


def _zero_biases(config: dict[str, Any]) -> State:
    """MiMo is read as Qwen2, whose q, k and v have biases."""
    modules = config["num_nextn_predict_layers"]
    prefixes = [f"model.layers.{i}." for i in range(config["num_hidden_layers"])] + [
        f"model.mtp_layers.{i}." for i in range(modules)
    ]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    rows = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
    return {f"{prefix}self_attn.{n}_proj.bias": torch.zeros(count) for prefix in prefixes for n, count in rows.items()}


def _write(folder: Path, tensors: State, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _layer_config(folder: Path) -> dict[str, Any]:
    """The target's configuration as that of a block as wide as its own."""
    raw = read_json(folder / "config.json")
    return {**raw, "dtype": "bfloat16", "torch_dtype": "bfloat16", "tie_word_embeddings": False}


def _vocabulary(token_map: Tensor, vocab: int) -> State:
    flags = torch.zeros(vocab, dtype=torch.bool).index_fill(0, token_map, True)
    return {"d2t": token_map - torch.arange(len(token_map)), "t2d": flags}


def _eagle3(state: State, shape: Shape, token_map: Tensor, target: TargetWeights, base: dict[str, Any], _: int) -> Published:
    layers = 1 + len({name.split(".")[1] for name in state if name.startswith("rest.")})
    first = "midlayer." if layers == 1 else "layers.0."
    names = layouts.eagle3_names(
        shape, streams=3, layers=layers, first=first, norm_before_fc=False, fc_norm=False, fc_bias=False
    )
    config = {
        **base,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": layers,
        "draft_vocab_size": len(token_map),
        "norm_before_residual": False,
    }
    return Published(layouts.write(state, names) | _vocabulary(token_map, shape.vocab), config)


def _p_eagle(
    state: State, shape: Shape, token_map: Tensor, target: TargetWeights, base: dict[str, Any], mask: int
) -> Published:
    body = {name.removeprefix("body."): tensor for name, tensor in state.items() if name.startswith("body.")}
    head = _eagle3(body, shape, token_map, target, base, mask)
    own = head.own | {"mask_hidden": state["mask_hidden"][None, None], MASK_EMBEDDING: state[MASK_EMBEDDING]}
    return Published(own, head.config | {"mask_token_id": mask, "ptd_token_id": mask})


def _eagle2(state: State, shape: Shape, token_map: Tensor, target: TargetWeights, base: dict[str, Any], _: int) -> Published:
    layers = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    names = layouts.eagle_names(shape, layers=layers, fc_bias="fc.bias" in state)
    config = {
        **base,
        "architectures": ["EagleLlamaForCausalLM"],
        "num_hidden_layers": layers,
    }  # vLLM; SGLang: LlamaForCausalLMEagle
    return Published(layouts.write(state, names), config)


def _medusa(state: State, shape: Shape, token_map: Tensor, target: TargetWeights, base: dict[str, Any], _: int) -> Published:
    """vLLM's spelling, which has a reduced vocabulary; FasterDecoding's has none."""
    own = {f"blocks.{head}.layers.{layer}.{kind}": t for (head, layer, kind), t in _medusa_parts(state)}
    heads = 1 + max(int(name.split(".")[1]) for name in own)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": shape.hidden,
        "vocab_size": shape.vocab,
        "truncated_vocab_size": len(token_map),
        "num_heads": heads,
        "num_hidden_layers": len(own) // heads // 2,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "dtype": "bfloat16",
    }
    return Published(own | {"token_map": token_map}, config)


def _medusa_parts(state: State) -> list[tuple[tuple[str, str, str], Tensor]]:
    parts = [(name.split("."), tensor) for name, tensor in state.items() if name.startswith("blocks.")]
    return [((head, layer, kind), tensor) for (_, head, layer, kind), tensor in parts]


def _mtp(state: State, shape: Shape, token_map: Tensor, target: TargetWeights, base: dict[str, Any], _: int) -> Published:
    """MiMo's layout: the module inside the target's checkpoint, read as Qwen2 with biases of zero."""
    modules = len({name.split(".")[1] for name in state if name.startswith("modules_.")})
    prefix = "model.mtp_layers."
    names = layouts.mtp_names(shape, modules=modules, prefix=prefix, first=0, parts=layouts.MIMO, bias=False, head_norms=False)
    tied = target.config.tied_embeddings
    config = {
        **base,
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": modules,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
    }
    return Published(layouts.write(state, names), config)


def _draft_model(
    state: State, shape: Shape, token_map: Tensor, target: TargetWeights, base: dict[str, Any], _: int
) -> Published:
    layers = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    names: layouts.Names = [("norm.weight", (("model.norm.weight", (shape.hidden,)),))]
    for layer in range(layers):
        names += layouts.block_names(f"blocks.{layer}.", f"model.layers.{layer}.", shape)
    tied = target.config.tied_embeddings
    config = {**base, "num_hidden_layers": layers, "tie_word_embeddings": tied}
    return Published(layouts.write(state, names), config)


def _all_tensors(folder: Path) -> State:
    tensors: State = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


WRITERS: dict[str, Callable[[State, Shape, Tensor, TargetWeights, dict[str, Any], int], Published]] = {
    "eagle3": _eagle3,
    "p_eagle": _p_eagle,
    "eagle2": _eagle2,
    "medusa": _medusa,
    "mtp": _mtp,
    "draft_model": _draft_model,
}
