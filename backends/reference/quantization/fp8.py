"""fp8 (e4m3) weights times fp8 activations: one scale an output channel, and one a row, found when the row comes.

y = (q_x × scale_x) (q_w × scale_w)ᵀ + b
"""

from __future__ import annotations

import torch
from torch import Tensor

from backends.reference import kernels
from backends.reference.quantization.dense import Linear, unquantized

E4M3_MAX = 448.0


def fp8(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """`Fp8` where the device multiplies e4m3 and the sizes are those it takes, else `EmulatedFp8`."""
    native = multiplies_e4m3(weight.device, weight.dtype) and not any(size % 16 for size in weight.shape)
    return Fp8(weight, bias) if native else EmulatedFp8(weight, bias)


def multiplies_e4m3(device: torch.device, dtype: torch.dtype) -> bool:
    """GPUs that have e4m3 do, and give bf16 where each row has a scale."""
    return device.type == "cuda" and dtype == torch.bfloat16 and kernels.reads_fp8(device)


class Fp8:
    """A product of e4m3 numbers by the device."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        q, scale = to_e4m3(weight)
        self._q, self._scale = q.T, scale.T.contiguous()
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        q, scale = to_e4m3(x)
        y = torch._scaled_mm(q, self._q, scale, self._scale, out_dtype=x.dtype)
        return y if self.bias is None else y + self.bias


class EmulatedFp8:
    """The same numbers multiplied in bf16 or float32, where they are exact, and their products too in the float32 that sums are kept
    in. Beside an fp8 unit only the order of a sum differs and, in bf16, that it is rounded before it is scaled."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        q, scale = to_e4m3(weight)
        self._kind = torch.float32 if weight.dtype == torch.float32 else torch.bfloat16  # float16 ends at 65504, sums do not
        self._product, self._scale = unquantized(q.to(self._kind)), scale.T
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        q, scale = to_e4m3(x)
        y = (self._product(q.to(self._kind)) * (scale * self._scale)).to(x.dtype)
        return y if self.bias is None else y + self.bias


def to_e4m3(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows ≈ q × scale with q float8_e4m3fn of -448..448 [n, columns], and scale float32 [n, 1]."""
    scale = rows.float().abs().amax(1, keepdim=True).clamp_min_(1e-12).div_(E4M3_MAX)
    return (rows / scale).to(torch.float8_e4m3fn), scale
