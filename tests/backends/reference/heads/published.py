"""Random checkpoints in the layouts that are published, written by hand from their descriptions, and what they compute, derived
straight from the papers in plain torch on whole sequences."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig

from tests.backends.reference.tiny_models import VOCAB, save, shape

H, INNER, HEADS, KV, DIM, EPS, THETA = 64, 96, 4, 2, 16, 1e-5, 10000.0
DRAFT_VOCAB = 40
Tensors = dict[str, Tensor]


def target(folder: Path) -> Path:
    """A tiny Llama of 8 blocks, 64 wide."""
    save(LlamaConfig(**shape(rms_norm_eps=EPS)), folder)
    return folder


def config(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": H,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": DIM,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        **more,
    }


def rand(*size: int) -> Tensor:
    return torch.randn(*size) / math.sqrt(size[-1])


def norm_weight(width: int = H) -> Tensor:
    return 1 + 0.2 * torch.randn(width)


def block(prefix: str, width: int = H, *, input_norm: bool = True, bias: bool = False, inner: int = INNER) -> Tensors:
    tensors = {
        f"{prefix}self_attn.q_proj.weight": rand(HEADS * DIM, width),
        f"{prefix}self_attn.k_proj.weight": rand(KV * DIM, width),
        f"{prefix}self_attn.v_proj.weight": rand(KV * DIM, width),
        f"{prefix}self_attn.o_proj.weight": rand(H, HEADS * DIM),
        f"{prefix}mlp.gate_proj.weight": rand(inner, H),
        f"{prefix}mlp.up_proj.weight": rand(inner, H),
        f"{prefix}mlp.down_proj.weight": rand(H, inner),
        f"{prefix}post_attention_layernorm.weight": norm_weight(),
    }
    if input_norm:
        tensors[f"{prefix}input_layernorm.weight"] = norm_weight()
    if bias:
        tensors |= {f"{prefix}self_attn.{n}_proj.bias": torch.randn(r * DIM) for n, r in (("q", HEADS), ("k", KV), ("v", KV))}
    return tensors


def draft_map() -> tuple[Tensor, Tensor]:
    """d2t as offsets, and the ids it stands for."""
    ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    return ids - torch.arange(DRAFT_VOCAB), ids


def flags(ids: Tensor) -> Tensor:
    return torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)


def write(folder: Path, tensors: Tensors, raw: dict[str, Any], file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


# What the heads compute, on one whole sequence [n, ...] with causal attention.


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def attention(x: Tensor, t: Tensors, prefix: str, positions: Tensor) -> Tensor:
    def heads(name: str, count: int) -> Tensor:
        y = x @ t[f"{prefix}self_attn.{name}_proj.weight"].T + t.get(f"{prefix}self_attn.{name}_proj.bias", torch.zeros(()))
        return y.view(-1, count, DIM)

    def rotated(y: Tensor) -> Tensor:
        angle = positions[:, None] * THETA ** (-torch.arange(0, DIM, 2) / DIM)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        pairs = torch.complex(y[..., : DIM // 2], y[..., DIM // 2 :]) * turn
        return torch.cat((pairs.real, pairs.imag), -1)

    q, k, v = rotated(heads("q", HEADS)), rotated(heads("k", KV)), heads("v", KV)
    k, v = k.repeat_interleave(HEADS // KV, 1), v.repeat_interleave(HEADS // KV, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(DIM)
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf)
    mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
    return mixed @ t[f"{prefix}self_attn.o_proj.weight"].T


def mlp(x: Tensor, t: Tensors, prefix: str) -> Tensor:
    gate, up = (x @ t[f"{prefix}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    return (F.silu(gate) * up) @ t[f"{prefix}mlp.down_proj.weight"].T


def after_attention(x: Tensor, t: Tensors, prefix: str) -> Tensor:
    return x + mlp(rms(x, t[f"{prefix}post_attention_layernorm.weight"]), t, prefix)


def plain_block(x: Tensor, t: Tensors, prefix: str, positions: Tensor) -> Tensor:
    name = f"{prefix}input_layernorm.weight"
    return after_attention(x + attention(rms(x, t[name]) if name in t else x, t, prefix, positions), t, prefix)


def eagle3_block(e: Tensor, g: Tensor, t: Tensors, prefix: str, positions: Tensor, *, normed_residual: bool) -> Tensor:
    normed = rms(g, t[f"{prefix}hidden_norm.weight"])
    x = torch.cat((rms(e, t[f"{prefix}input_layernorm.weight"]), normed), -1)
    return after_attention((normed if normed_residual else g) + attention(x, t, prefix, positions), t, prefix)
