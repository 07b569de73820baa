"""int8 weights times int8 activations: one scale an output channel, and one a row, found when the row comes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from backends.reference.quantization.dense import unquantized


class Int8:
    """y = (q_x × scale_x) (q_w × scale_w)ᵀ + b.

    A row's scale comes from that row alone and sums of integers have no rounding, so that a row's result is the same to the bit
    whatever rows lie beside it. oneDNN multiplies on CPUs; elsewhere both sides are dequantized for each call: the same values,
    and not fast. On CPUs without VNNI oneDNN's int8 products saturate, so float32 multiplies the whole numbers there: as exact up to
    sums of 2^24, and as fast as float32 is.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.q, self.scale = to_int8(weight)
        self.bias = bias
        on_cpu = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        self.packed = on_cpu and torch.cpu._is_vnni_supported()
        self.whole = unquantized(self.q.float()) if on_cpu and not self.packed else None
        if self.packed:
            self.q = torch.ops.onednn.qlinear_prepack(self.q, None)
            self.scale = self.scale.flatten()

    def __call__(self, x: Tensor) -> Tensor:
        q, scale = to_int8(x)
        if self.packed:
            # oneDNN takes one scale for all rows only, so it gets 1, and each row is scaled afterwards.
            y = torch.ops.onednn.qlinear_pointwise.default(
                q, 1.0, 0, self.q, self.scale, None, None, 1.0, 0, torch.float32, "none", [], ""
            )
            y = y.mul_(scale).to(x.dtype)
        elif self.whole is not None:
            y = self.whole(q.float()).mul_(self.scale.T).mul_(scale).to(x.dtype)
        else:
            y = F.linear((q * scale).to(x.dtype), (self.q * self.scale).to(x.dtype))
        return y if self.bias is None else y + self.bias


def to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric: rows ≈ q × scale with q int8 of -127..127 [n, columns], and scale float32 [n, 1]."""
    scale = rows.float().abs().amax(1, keepdim=True).clamp_min_(1e-12).div_(127)
    return (rows / scale).round_().to(torch.int8), scale
