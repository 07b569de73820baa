"""The table of weight quantizations: how a linear layer is made of a dense weight, for blocks and for the output head.

| | weights | activations | output head |
|---|---|---|---|
| none | as loaded | as they are | as loaded |
| int8 | a scale an output channel | int8, a scale a row | int8 |
| int4 | a scale and a zero per group of inputs | as they are | int8: its rounding goes straight into the logits |
| fp8 | e4m3, a scale an output channel | e4m3, a scale a row | as loaded, as in the engines whose numerics it stands for |

Norms and the embedding table stay unquantized; a head that is tied to the table and quantized becomes a copy of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from backends.reference.config import Packing
from backends.reference.options import FP8_EMULATED
from backends.reference.quantization.dense import Linear, unquantized
from backends.reference.quantization.fp8 import fp8, multiplies_e4m3
from backends.reference.quantization.int4 import Int4
from backends.reference.quantization.int8 import Int8

Make = Callable[[Tensor, Tensor | None], Linear]

LINEARS: dict[str, Make] = {"none": unquantized, "int8": Int8, "int4": Int4.quantize, "fp8": fp8}
HEADS: dict[str, Make] = {"none": unquantized, "int8": Int8, "int4": Int8, "fp8": unquantized}


def weight_notes(quantization: str, packing: Packing | None, device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """What to know of numbers measured with such weights, a line each."""
    if packing is not None:
        converted = f"{packing.method} checkpoint: its 4-bit weights, in groups of {packing.group}, run as int4"
        return (f"{converted}, scales and zeros rounded to bf16 on a CPU; its other weights as they are",)
    if quantization == "fp8" and not multiplies_e4m3(device, dtype):
        return (FP8_EMULATED,)
    return ()
