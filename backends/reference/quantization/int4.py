"""int4 weights: a scale and a zero for each group of inputs. Activations stay as they are, but torch's CPU kernel runs on bf16
ones, so that a float32 model casts around it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from backends.reference import kernels
from backends.types import ConfigError

GROUP = 64
"""Inputs that share a scale where the engine itself quantizes. Checkpoints come with groups of their own."""
KERNEL_ROWS = 128
"""Above this many rows a GPU's step is bound by products, and one dequantized weight serves them all."""


class Int4:
    """Asymmetric: W ≈ (q - 8) × scale + zero with q in 0..15, per group of inputs."""

    def __init__(self, q: Tensor, scale_zero: Tensor, bias: Tensor | None = None) -> None:
        """q: uint8 [out, in] of 0..15; scale_zero: [groups, out, 2], rounded to bf16 on CPUs, where the kernel takes no other.

        Raises:
            ConfigError: outputs that are no multiple of 16, which the packed layout needs.
        """
        if len(q) % 16:
            raise ConfigError(f"int4 needs outputs in multiples of 16, a layer has {len(q)}")
        self._group = q.shape[1] // len(scale_zero)
        on_cpu = q.device.type == "cpu"
        self.q = torch._convert_weight_to_int4pack_for_cpu(q.int(), 1) if on_cpu else pack_int4(q, self._group)
        self.scale_zero = scale_zero.to(torch.bfloat16) if on_cpu else scale_zero
        self.bias = bias

    @classmethod
    def quantize(cls, weight: Tensor, bias: Tensor | None = None) -> Int4:
        """Round to the nearest of each group's 16 values.

        Raises:
            ConfigError: sizes that are no multiples of a group.
        """
        return cls(*quantize_int4(weight), bias)

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            y = torch._weight_int4pack_mm_for_cpu(x.to(torch.bfloat16), self.q, self._group, self.scale_zero).to(x.dtype)
        elif kernels.usable(x.device) and len(x) <= KERNEL_ROWS:
            from backends.reference.kernels.int4_linear import int4_linear  # needs triton

            y = int4_linear(x, self.q, self.scale_zero)
        else:
            y = F.linear(x, dequantize_int4(self.q, self.scale_zero, x.dtype))
        return y if self.bias is None else y + self.bias


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """q as uint8 [out, in], and scale and zero as bf16 [groups, out, 2].

    Raises:
        ConfigError: inputs that are no multiple of a group.
    """
    rows, columns = weight.shape
    if columns % GROUP:
        raise ConfigError(f"int4 needs inputs in groups of {GROUP}, a layer has {columns}")
    groups = weight.float().view(rows, columns // GROUP, GROUP)
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    scale = ((high - low) / 15).clamp_min(1e-12).to(torch.bfloat16).float()
    zero = (low + 8 * scale).to(torch.bfloat16).float()
    q = ((groups - zero[..., None]) / scale[..., None] + 8).round().clamp(0, 15).to(torch.uint8).view(rows, columns)
    return q, torch.stack((scale, zero), dim=2).transpose(0, 1).contiguous().to(torch.bfloat16)


def pack_int4(q: Tensor, group: int) -> Tensor:
    """uint8 [out, in] of 0..15 -> uint8 [out, in / 2]: in each group the second half of the inputs lies in the high halves."""
    low, high = q.view(len(q), -1, 2, group // 2).unbind(2)
    return (low | high << 4).flatten(1)


def dequantize_int4(packed: Tensor, scale_zero: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] of what `pack_int4` made."""
    halves = packed.unflatten(1, (len(scale_zero), 1, -1))
    q = torch.cat((halves & 15, halves >> 4), 2).flatten(2).to(dtype)  # [out, groups, inputs of a group]
    scale, zero = scale_zero.to(dtype).transpose(0, 1).unsqueeze(2).unbind(-1)
    return ((q - 8) * scale + zero).flatten(1)
