"""The parts heads are made of: a Llama block with attention from outside, norms, and rotary tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from backends.reference.config import RopeConfig
from backends.reference.model import rope_tables

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q, k, v) -> out: see the package's docstring."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a head's blocks. `target_hidden` is the width of the target's hidden states, `hidden` the head's own."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeConfig
    positions: int
    target_hidden: int
    vocab: int  # of the target


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class Rotary(nn.Module):
    """cos and sin for positions [...]: [..., 1, head_dim] each, in float32; sin's first half is negated."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        cos, sin = rope_tables(shape.rope, shape.head_dim, shape.positions, torch.device("cpu"))
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)


class Attention(nn.Module):
    """Projections of one layer. `inputs` is the width of what is attended from: 2 × hidden in EAGLE-3's first block."""

    def __init__(self, shape: Shape, inputs: int, *, bias: bool = False, head_norms: bool = False) -> None:
        super().__init__()
        self.split = shape.heads, shape.kv_heads, shape.kv_heads
        self.head_dim = shape.head_dim
        self.qkv = nn.Linear(inputs, sum(self.split) * shape.head_dim, bias=bias)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_eps) if head_norms else None
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_eps) if head_norms else None
        self.out = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """k and v [..., kv_heads, head_dim] alone: all that rows are needed for whose output nobody asks for."""
        rows = self.split[0] * self.head_dim
        bias = None if self.qkv.bias is None else self.qkv.bias[rows:]
        k, v = F.linear(x, self.qkv.weight[rows:], bias).unflatten(-1, (-1, self.head_dim)).chunk(2, -2)
        return rotate(k if self.k_norm is None else self.k_norm(k), rotary), v

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], layer: int, attend: Attend) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(self.split, dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.out(attend(layer, rotate(q, rotary), rotate(k, rotary), v).flatten(-2))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """A Llama block. `input_norm` False: the input is attended to as it comes (the first block of EAGLE-1/2)."""

    def __init__(self, shape: Shape, *, input_norm: bool = True, bias: bool = False, head_norms: bool = False) -> None:
        super().__init__()
        self.input_norm = RMSNorm(shape.hidden, shape.rms_eps) if input_norm else None
        self.attention = Attention(shape, shape.hidden, bias=bias, head_norms=head_norms)
        self.post_norm = RMSNorm(shape.hidden, shape.rms_eps)
        self.mlp = MLP(shape)

    def _normed(self, x: Tensor) -> Tensor:
        return x if self.input_norm is None else self.input_norm(x)

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.attention.keys_values(self._normed(x), rotary)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], layer: int, attend: Attend) -> Tensor:
        """x [..., hidden] -> [..., hidden]."""
        x = x + self.attention(self._normed(x), rotary, layer, attend)
        return x + self.mlp(self.post_norm(x))


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of x [..., heads, head_dim], pairs (i, i + head_dim / 2), as Llama checkpoints have it."""
    cos, sin = (table.to(x.dtype) for table in rotary)
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((right, left), -1) * sin


def causal(mask: Tensor | None = None) -> Attend:
    """An `attend` over whole sequences [batch, n]: causal, or as the boolean `mask` [batch or 1, 1, n, n] says (True: visible)."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return out.transpose(-3, -2)

    return attend


def with_linears(module: nn.Module, make: Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]]) -> None:
    """Replace every `nn.Linear` inside by what `make(weight, bias)` gives: how a loaded head is packed or quantized. The dtype of
    the weights stays what `module.to(dtype)` made it before."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, _Made(make(child.weight.detach(), None if child.bias is None else child.bias.detach())))
        else:
            with_linears(child, make)


def borrow(head: nn.Module, logits: Callable[[Tensor], Tensor]) -> None:
    """Let `head.head`, a copy of the target's LM head, be the target's own, packed or quantized as it runs."""
    head.head = _Made(logits)


class _Made(nn.Module):
    def __init__(self, linear: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x)
