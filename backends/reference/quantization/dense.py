"""Linear layers as they are in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

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


def cpu_has_bf16() -> bool:
    """Whether bf16 products are worth it on this CPU: without instructions for them they are slower than float32's."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def unquantized(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """`Packed` where oneDNN computes in the weight's dtype, else `Dense`."""
    if weight.device.type == "cpu" and torch.backends.mkldnn.is_available():
        bf16 = weight.dtype == torch.bfloat16 and cpu_has_bf16()
        if bf16 or weight.dtype == torch.float32:
            return Packed(weight, bias)
    return Dense(weight, bias)
