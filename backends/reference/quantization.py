"""Linear layers: dense, int8 (one scale per output channel) and int4 (scale and zero per group of 64 inputs).

Weights only; activations stay as they are, but torch's CPU kernels for both run on bf16 activations (with float32 ones the
int8 kernel is four times slower), so a float32 model casts around them. On GPUs int4 has a kernel for few rows; the rest is
dequantized for each call: right, and not fast. Norms and the embedding table stay unquantized; the output head is int8 in both
modes, because its rounding goes straight into the logits (where it is tied to the embedding it becomes a copy of its own).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from backends.reference import kernels
from backends.types import ConfigError

QUANTIZATIONS = ("none", "int8", "int4")
INT4_GROUP = 64
INT4_KERNEL_ROWS = 128
"""Above this many rows a GPU's step is bound by products, and one dequantized weight serves them all."""

Linear = Callable[[Tensor], Tensor]
"""[n, in] -> [n, out], in the dtype of the input."""


class Dense:
    """y = x Wᵀ + b."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Packed:
    """The same, with the weight laid out once for oneDNN: 5 rows then cost little more than 1, which is what verification needs
    (a plain float32 linear takes about twice as long for 5 rows as for 1 on an AVX2 CPU)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def unquantized(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """`Packed` where oneDNN computes in the weight's dtype, else `Dense`."""
    if weight.device.type == "cpu" and torch.backends.mkldnn.is_available():
        bf16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if bf16 or weight.dtype == torch.float32:
            return Packed(weight, bias)
    return Dense(weight, bias)


class Int8:
    """Symmetric: W ≈ q × scale with q in -127..127 and one scale per output channel."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        weight = weight.float()
        scale = weight.abs().amax(dim=1).clamp_min(1e-12) / 127
        self.q = (weight / scale[:, None]).round().to(torch.int8)
        self.scale = scale.to(torch.bfloat16)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            y = torch._weight_int8pack_mm(x.to(torch.bfloat16), self.q, self.scale).to(x.dtype)
        else:
            y = F.linear(x, self.q.to(x.dtype) * self.scale.to(x.dtype)[:, None])
        return y if self.bias is None else y + self.bias


class Int4:
    """Asymmetric: W ≈ (q - 8) × scale + zero with q in 0..15, per group of `INT4_GROUP` inputs."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        q, self.scale_zero = quantize_int4(weight)
        on_cpu = weight.device.type == "cpu"
        self.q = torch._convert_weight_to_int4pack_for_cpu(q.to(torch.int32), 1) if on_cpu else pack_int4(q)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            y = torch._weight_int4pack_mm_for_cpu(x.to(torch.bfloat16), self.q, INT4_GROUP, self.scale_zero).to(x.dtype)
        elif kernels.usable(x.device) and len(x) <= INT4_KERNEL_ROWS:
            from backends.reference.kernels.int4_linear import int4_linear  # needs triton

            y = int4_linear(x, self.q, self.scale_zero)
        else:
            y = F.linear(x, dequantize_int4(self.q, self.scale_zero, x.dtype))
        return y if self.bias is None else y + self.bias


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """q as uint8 [out, in], and scale and zero as bf16 [groups, out, 2].

    Raises:
        ConfigError: sizes that are no multiples of a group.
    """
    rows, columns = weight.shape
    if columns % INT4_GROUP or rows % 16:
        raise ConfigError(f"int4 needs inputs in groups of {INT4_GROUP} and outputs of 16, a layer has {columns} -> {rows}")
    groups = weight.float().view(rows, columns // INT4_GROUP, INT4_GROUP)
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    scale = ((high - low) / 15).clamp_min(1e-12).to(torch.bfloat16).float()
    zero = (low + 8 * scale).to(torch.bfloat16).float()
    q = ((groups - zero[..., None]) / scale[..., None] + 8).round().clamp(0, 15).to(torch.uint8).view(rows, columns)
    return q, torch.stack((scale, zero), dim=2).transpose(0, 1).contiguous().to(torch.bfloat16)


def pack_int4(q: Tensor) -> Tensor:
    """uint8 [out, in] of 0..15 -> uint8 [out, in / 2]: in each group the second half of the inputs lies in the high halves."""
    low, high = q.view(len(q), -1, 2, INT4_GROUP // 2).unbind(2)
    return (low | high << 4).flatten(1)


def dequantize_int4(packed: Tensor, scale_zero: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] of what `pack_int4` made."""
    halves = packed.view(len(packed), -1, 1, INT4_GROUP // 2)
    q = torch.cat((halves & 15, halves >> 4), 2).flatten(2).to(dtype)  # [out, groups, INT4_GROUP]
    scale, zero = scale_zero.to(dtype).transpose(0, 1).unsqueeze(2).unbind(-1)
    return ((q - 8) * scale + zero).flatten(1)


LINEARS: dict[str, Callable[[Tensor, Tensor | None], Linear]] = {"none": unquantized, "int8": Int8, "int4": Int4}
HEADS: dict[str, Callable[[Tensor, Tensor | None], Linear]] = {"none": unquantized, "int8": Int8, "int4": Int8}
