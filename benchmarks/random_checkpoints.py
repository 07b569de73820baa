"""Checkpoints of a given shape with random weights: what they say is noise, what a step of them costs is not."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a Llama."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = False


LLAMA_8B = Shape(4096, 14336, 32, 32, 8, 128256)  # Llama 3.1 8B
LLAMA_1B = Shape(2048, 8192, 16, 32, 8, 128256, tied=True)  # Llama 3.2 1B
SMALL_TARGET = Shape(64, 128, 8, 4, 2, 512)
SMALL_DRAFT = Shape(32, 64, 1, 2, 1, 512, tied=True)
CONTEXT = 8192


def write_target(folder: Path, shape: Shape, *, tokenizer: Path, device: torch.device) -> Path:
    """A bf16 model in Hugging Face layout, one file a layer, with the tokenizer of the model in `tokenizer`."""
    folder.mkdir(parents=True)
    files = {"embedding": {"model.embed_tokens.weight": _random(device, shape.vocab, shape.hidden)}}
    _save(folder, "embedding", files["embedding"])
    where = dict.fromkeys(files["embedding"], "embedding.safetensors")
    for index in range(shape.layers):
        tensors = _block(device, f"model.layers.{index}.", shape, shape.hidden)
        where |= dict.fromkeys(tensors, f"layer{index}.safetensors")
        _save(folder, f"layer{index}", tensors)
    tail = {"model.norm.weight": torch.ones(shape.hidden)}
    if not shape.tied:
        tail["lm_head.weight"] = _random(device, shape.vocab, shape.hidden)
    _save(folder, "tail", tail)
    where |= dict.fromkeys(tail, "tail.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(_config(shape) | {"architectures": ["LlamaForCausalLM"]}))
    for path in tokenizer.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def write_eagle3(folder: Path, target: Shape, *, draft_vocab: int, device: torch.device) -> Path:
    """An EAGLE-3 head for `target`, of one block, in SafeAILab's layout; it drafts the ids 0..draft_vocab - 1."""
    folder.mkdir(parents=True)
    tensors = _block(device, "midlayer.", target, 2 * target.hidden) | {
        "midlayer.hidden_norm.weight": torch.ones(target.hidden),
        "fc.weight": _random(device, target.hidden, 3 * target.hidden),
        "norm.weight": torch.ones(target.hidden),
        "lm_head.weight": _random(device, draft_vocab, target.hidden),
    }
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_file(tensors | {"d2t": torch.zeros(draft_vocab, dtype=torch.int64)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config(target) | {"draft_vocab_size": draft_vocab}))
    return folder


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    }


def _block(device: torch.device, prefix: str, shape: Shape, inputs: int) -> dict[str, Tensor]:
    kv = shape.hidden // shape.heads * shape.kv_heads
    sizes = {
        "self_attn.q_proj": (shape.hidden, inputs),
        "self_attn.k_proj": (kv, inputs),
        "self_attn.v_proj": (kv, inputs),
        "self_attn.o_proj": (shape.hidden, shape.hidden),
        "mlp.gate_proj": (shape.inner, shape.hidden),
        "mlp.up_proj": (shape.inner, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.inner),
    }
    tensors = {f"{prefix}{name}.weight": _random(device, *size) for name, size in sizes.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    return tensors | {f"{prefix}{name}.weight": torch.ones(shape.hidden) for name in norms}


def _random(device: torch.device, rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device=device, dtype=torch.bfloat16).div_(math.sqrt(columns)).cpu()


def _save(folder: Path, name: str, tensors: dict[str, Tensor]) -> None:
    save_file({key: tensor.to(torch.bfloat16) for key, tensor in tensors.items()}, folder / f"{name}.safetensors")
