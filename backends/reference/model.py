"""A Llama-family decoder as a function of new tokens and a KV cache. It knows nothing of requests or schedules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from backends.reference.attention import attend
from backends.reference.batch import Batch
from backends.reference.config import ModelConfig, RopeConfig
from backends.reference.kv_cache import KVCache
from backends.reference.quantization.dense import Linear


@dataclass(frozen=True, slots=True)
class Layer:
    """One block. q, k and v are one linear, gate and up another. q/k norms [head_dim] exist in Qwen3 only."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Weights and forward pass of one model."""

    def __init__(
        self, config: ModelConfig, *, embedding: Tensor, layers: Sequence[Layer], norm: Tensor, head: Linear, positions: int
    ) -> None:
        self.config = config
        self.dtype = embedding.dtype
        self.device = embedding.device
        self.embedding = embedding
        self._layers = tuple(layers)
        self._norm = norm
        self._head = head
        self._cos, self._sin = (t.to(self.dtype) for t in rope_tables(config.rope, config.head_dim, positions, self.device))

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache, capture: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """Run the batch's n tokens through all blocks, writing their keys and values.

        Returns the final hidden states after the last norm, [n, hidden], and for each i in `capture` (ascending) the residual
        stream after i blocks, [n, hidden].
        """
        config = self.config
        heads, kv_heads, dim, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.rms_eps
        rotated = heads + kv_heads
        x = F.embedding(batch.token_ids, self.embedding)
        n, hidden = x.shape
        cos, sin = self._cos[batch.positions].unsqueeze(1), self._sin[batch.positions].unsqueeze(1)
        captured: list[Tensor] = []
        for index, layer in enumerate(self._layers):
            if index in capture:
                captured.append(x)
            qkv = layer.qkv(F.rms_norm(x, (hidden,), layer.input_norm, eps)).view(n, heads + 2 * kv_heads, dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                qkv[:, :heads] = F.rms_norm(qkv[:, :heads], (dim,), layer.q_norm, eps)
                qkv[:, heads:rotated] = F.rms_norm(qkv[:, heads:rotated], (dim,), layer.k_norm, eps)
            qk = qkv[:, :rotated]
            left, right = qk.chunk(2, -1)
            qk.copy_(torch.addcmul(qk * cos, torch.cat((right, left), -1), sin))
            cache.write(index, batch.rows, qkv[:, heads:].view(n, 2, kv_heads, dim))
            x = x + layer.out(attend(qkv[:, :heads], batch, cache, index).flatten(1))
            gate, up = layer.gate_up(F.rms_norm(x, (hidden,), layer.post_norm, eps)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        if len(self._layers) in capture:
            captured.append(x)
        return F.rms_norm(x, (hidden,), self._norm, eps), captured

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> float32 [n, vocab]."""
        return self._head(hidden).float()


def rope_tables(rope: RopeConfig, dim: int, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, dim] in float32; the first half of sin is negated, for x cos + swap_halves(x) sin."""
    frequency = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.kind == "linear":
        frequency = frequency / rope.factor
    elif rope.kind == "llama3":
        frequency = _llama3(frequency, rope)
    angle = torch.outer(torch.arange(positions, dtype=torch.float32), frequency).to(device)
    return torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)


def _llama3(frequency: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: frequencies with few turns in the original context are divided by `factor`, fast ones kept, a ramp between."""
    turns = rope.original_context_tokens * frequency / (2 * math.pi)  # full turns within the original context
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return frequency * (keep + (1 - keep) / rope.factor)
