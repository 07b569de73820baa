"""Keys and values of every running sequence: one slot each, one row per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


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

    def __init__(self, shape: KVShape, *, slots: int, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        row = (2, shape.num_kv_heads, shape.head_dim)
        self.rows = rows
        self._layers = [_lazy_zeros((slots, rows, *row), dtype, device) for _ in range(shape.num_layers)]
        self._flat = [layer.view(slots * rows, *row) for layer in self._layers]

    def write(self, layer: int, at: Tensor, keys_values: Tensor) -> None:
        """Store [n, 2, kv_heads, head_dim] at flat rows `at` [n] (slot × rows + row)."""
        self._flat[layer].index_copy_(0, at, keys_values)

    def read(self, layer: int, slot: int, count: int, length: int) -> tuple[Tensor, Tensor]:
        """K and V views [count, kv_heads, length, head_dim] of `count` slots from `slot` on."""
        view = self._layers[layer][slot : slot + count, :length]
        return view[:, :, 0].transpose(1, 2), view[:, :, 1].transpose(1, 2)

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """The first `rows` rows of slot `source` become those of slot `target`."""
        if source != target and rows:
            for layer in self._layers:
                layer[target, :rows] = layer[source, :rows]

    def layer(self, layer: int) -> Tensor:
        """[slots, rows, 2, kv_heads, head_dim]."""
        return self._layers[layer]

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
            for flat in self._flat:
                flat.index_copy_(0, to_rows, flat[from_rows])


def token_bytes(shape: KVShape, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values over all layers."""
    return shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, because 0 × NaN of an unwritten row would spoil a masked softmax; by calloc, which takes no memory yet."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(shape)
