"""Keys and values of every running sequence: one slot each, one row per token, as they are or quantized to 8 bits.

A quantized K or V of a KV head is q × scale, with a scale of its own for each token. What is stored for a token then depends on its
own K and V alone: not on what was written before it or beside it, so that drafts, batches and the cutting of prompts change
nothing. fp8 (e4m3) has such scales too, other than in vLLM, whose scale of 1 loses what lies above 448 or far below 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

QUANTIZED = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}
"""How q is stored, and its largest value, which the largest number of a K or V becomes."""

LEAST_SCALE = torch.finfo(torch.float32).tiny


class KVShape(Protocol):
    """What a cache must know of a model or a head."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


class KVCache:
    """Per layer a tensor [slots, rows, 2, kv_heads, head_dim]; a token's K and V lie together and are written in one copy.

    A sequence's token i sits in row i of its slot, so sequences in neighbouring slots are read as one strided view and
    nothing is gathered. On a CPU the pages of rows never written are not resident: slots × rows may exceed the memory that
    the scheduler's token budget allows. A GPU gets all of it at once.
    """

    def __init__(
        self,
        shape: KVShape,
        *,
        slots: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        stored: str = "auto",
    ) -> None:
        """`dtype` is what is written and read, `stored` one of `options.KV_CACHE_DTYPES`. Quantized layers have a float32 tensor of
        scales [slots, rows, 2, kv_heads] beside them."""
        row = (2, shape.num_kv_heads, shape.head_dim)
        self.rows = rows
        self._dtype, self._stored = dtype, stored
        quantized = stored != "auto"
        kept = QUANTIZED[stored][0] if quantized else dtype
        moved = torch.int8 if quantized else dtype  # rows of fp8 move as bytes: index_copy_ does not know them
        self._layers = [_lazy_zeros((slots, rows, *row), kept, device) for _ in range(shape.num_layers)]
        self._scales = [_lazy_zeros((slots, rows, *row[:2]), torch.float32, device) for _ in self._layers if quantized]
        self._flat = [layer.flatten(0, 1).view(moved) for layer in self._layers]
        self._flat_scales = [scales.flatten(0, 1) for scales in self._scales]

    def write(self, layer: int, at: Tensor, keys_values: Tensor) -> None:
        """Store [n, 2, kv_heads, head_dim] at flat rows `at` [n] (slot × rows + row)."""
        if self._scales:
            q, scales = quantize(keys_values, self._stored)
            keys_values = q.view(torch.int8)
            self._flat_scales[layer].index_copy_(0, at, scales)
        self._flat[layer].index_copy_(0, at, keys_values)

    def read(self, layer: int, slot: int, count: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V [count, kv_heads, length, head_dim] of `count` slots from `slot` on: views, or what these rows dequantize to."""
        rows = self._layers[layer][slot : slot + count, :length]
        if self._scales:
            rows = dequantize(rows, self._scales[layer][slot : slot + count, :length], self._dtype)
        return rows[:, :, 0].transpose(1, 2), rows[:, :, 1].transpose(1, 2)

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """The first `rows` rows of slot `source` become those of slot `target`."""
        if source != target and rows:
            for layer in (*self._layers, *self._scales):
                layer[target, :rows] = layer[source, :rows]

    def layer(self, layer: int) -> Tensor:
        """[slots, rows, 2, kv_heads, head_dim], as it is stored."""
        return self._layers[layer]

    def scales(self, layer: int) -> Tensor | None:
        """[slots, rows, 2, kv_heads] of a quantized layer."""
        return self._scales[layer] if self._scales else None

    def keep_paths(self, accepted: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """For each (slot, base, nodes of an accepted tree path) move rows base + node to base + 1, base + 2, ... A chain's rows lie
        right already."""
        source: list[int] = []
        target: list[int] = []
        for slot, base, nodes in accepted:
            first = slot * self.rows + base
            for depth, node in enumerate(nodes, 1):
                if node != depth:
                    source.append(first + node)
                    target.append(first + depth)
        if source:
            device = self._flat[0].device
            from_rows, to_rows = torch.tensor(source, device=device), torch.tensor(target, device=device)
            for flat in (*self._flat, *self._flat_scales):
                flat.index_copy_(0, to_rows, flat[from_rows])


def quantize(rows: Tensor, stored: str) -> tuple[Tensor, Tensor]:
    """[..., head_dim] -> q of the same shape, and float32 scales [...]."""
    dtype, largest = QUANTIZED[stored]
    rows = rows.float()
    scales = (rows.abs().amax(-1) / largest).clamp_min(LEAST_SCALE)
    q = rows / scales[..., None]
    return (q if dtype.is_floating_point else q.round()).to(dtype), scales


def dequantize(q: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """q × scale, multiplied in float32: [..., head_dim] in `dtype`."""
    if q.dtype == torch.float8_e4m3fn:  # eight times as fast as torch's own conversion on a CPU
        q, scales = _e4m3_as_float16(q), scales * 2**8
    return q.to(torch.float32).mul_(scales[..., None]).to(dtype)


def _e4m3_as_float16(q: Tensor) -> Tensor:
    """q × 2^-8, by its bits: sign, exponent and mantissa go where a float16 has them, whose exponent is larger by 15 - 7."""
    return q.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~(1 << 14)).view(torch.float16)


def token_bytes(shape: KVShape, dtype: torch.dtype, stored: str = "auto") -> int:
    """Bytes of one token's keys and values over all layers, scales included."""
    if stored == "auto":
        head_bytes = shape.head_dim * dtype.itemsize
    else:
        head_bytes = shape.head_dim * QUANTIZED[stored][0].itemsize + torch.float32.itemsize
    return shape.num_layers * 2 * shape.num_kv_heads * head_bytes


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, because 0 × NaN of an unwritten row would spoil a masked softmax; by calloc, which takes no memory yet."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(shape)
