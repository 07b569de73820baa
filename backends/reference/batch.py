"""New tokens of several sequences as one flat batch, with what attention needs to know about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backends.reference import kernels

WIDE = 32
"""From this many new tokens on a piece is attended alone (a prefill chunk); below, neighbours share one padded call."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one sequence: its KV rows 0..base-1 are there, these go to rows base, base+1, ...

    `parents` makes them a tree: node 0 is the root, entry i is the parent of node i + 1, always smaller than i + 1. None is a
    chain. A node sees rows below `base` and its own path from the root; its position is base + depth. A tree may be run level by
    level: `done` nodes are in the cache already, and `tokens` are the rest of those that `parents` describes.
    """

    slot: int
    base: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    done: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Pieces in neighbouring slots that are attended in one call, padded to `width` query rows each."""

    start: int  # first flat row
    slot: int
    count: int
    width: int
    rows: int  # flat rows
    length: int  # KV rows read
    mask: Tensor | None  # additive [count, 1, width, length]; None: causal over a KV that holds only this piece, or all visible
    causal: bool = False
    pad: Tensor | None = None  # [count × width] flat row for each padded row; None where nothing is padded
    unpad: Tensor | None = None  # [rows] padded row for each flat row


@dataclass(frozen=True, slots=True)
class Narrow:
    """All pieces of fewer than `WIDE` own rows, in whatever slots, for `kernels.tree_attention`: no mask over the KV."""

    pieces: Tensor  # int64 [pieces, 5]: first flat row, new rows, slot, base, end (KV rows written once these are)
    seen: Tensor  # int32 [n], for every flat row of the batch: bit i is set where it sees row base + i. 0 in other pieces
    width: int  # most new rows of a piece
    length: int  # greatest end
    window: int | None


@dataclass(frozen=True, slots=True)
class Batch:
    """`token_ids`, `positions` and `rows` (flat KV rows) are [n]; pieces lie sorted by slot, `starts` says where. A piece is in
    `narrow` or in one of the `groups`."""

    token_ids: Tensor
    positions: Tensor
    rows: Tensor
    groups: tuple[Group, ...]
    narrow: Narrow | None
    starts: dict[int, int]  # slot -> first flat row


def build_batch(
    pieces: Sequence[Piece], *, slot_rows: int, dtype: torch.dtype, device: torch.device, window: int | None = None
) -> Batch:
    """Lay `pieces` (at most one a slot) out for a forward pass; `slot_rows` is the KV rows of one slot."""
    pieces = sorted(pieces, key=lambda piece: piece.slot)
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    starts: dict[int, int] = {}
    for piece in pieces:
        n = len(piece.tokens)
        starts[piece.slot] = len(tokens)
        tokens += piece.tokens
        first = piece.slot * slot_rows + piece.base + piece.done
        rows += range(first, first + n)
        positions += range(piece.base, piece.base + n) if piece.parents is None else _positions(piece)
    narrow = [piece for piece in pieces if _own_rows(piece) < WIDE] if kernels.usable(device) else []
    others = [piece for piece in pieces if _own_rows(piece) >= WIDE] if narrow else pieces
    return Batch(
        upload(tokens, device),
        upload(positions, device),
        upload(rows, device),
        tuple(_group(run, starts[run[0].slot], dtype, device, window) for run in _runs(others)),
        narrow_rows(narrow, starts, len(tokens), device, window) if narrow else None,
        starts,
    )


def upload(values: Sequence[float] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor on `device`. To a GPU it goes from pinned memory, so that the host does not wait for what runs there."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _own_rows(piece: Piece) -> int:
    return piece.done + len(piece.tokens)


def narrow_rows(pieces: Sequence[Piece], starts: dict[int, int], n: int, device: torch.device, window: int | None) -> Narrow:
    """`starts` gives the first of each piece's rows among the batch's n, by slot."""
    seen = [0] * n
    table: list[tuple[int, int, int, int, int]] = []
    for piece in pieces:
        start, new, own = starts[piece.slot], len(piece.tokens), _own_rows(piece)
        bits = [1]
        for node in range(1, own):
            bits.append(1 << node | bits[node - 1 if piece.parents is None else piece.parents[node - 1]])
        seen[start : start + new] = bits[piece.done :]
        table.append((start, new, piece.slot, piece.base, piece.base + own))
    width, length = max(new for _, new, *_ in table), max(end for *_, end in table)
    return Narrow(upload(table, device), upload(seen, device, torch.int32), width, length, window)


def _positions(piece: Piece) -> list[int]:
    """Of a tree's new nodes."""
    positions = [piece.base]
    for parent in piece.parents or ():
        positions.append(positions[parent] + 1)
    return positions[piece.done :]


def _runs(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Narrow pieces in consecutive slots together, wide ones alone."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        previous = runs[-1][-1] if runs else None
        if previous and piece.slot == previous.slot + 1 and max(len(piece.tokens), len(previous.tokens)) < WIDE:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def _group(run: list[Piece], start: int, dtype: torch.dtype, device: torch.device, window: int | None) -> Group:
    widths = [len(piece.tokens) for piece in run]
    rows, width, count = sum(widths), max(widths), len(run)
    length = max(piece.base + piece.done + len(piece.tokens) for piece in run)
    slot = run[0].slot
    narrow = window is None or length <= window
    if count == 1 and narrow and run[0].parents is None and (width == 1 or run[0].base == 0):
        return Group(start, slot, 1, width, rows, length, None, causal=width > 1)
    mask = _mask(run, width, length, device, window)
    additive = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, float("-inf"))[:, None]
    if min(widths) == width:
        return Group(start, slot, count, width, rows, length, additive)
    pad: list[int] = []
    unpad: list[int] = []
    first = 0
    for index, n in enumerate(widths):
        pad += [first + min(i, n - 1) for i in range(width)]
        unpad += range(index * width, index * width + n)
        first += n
    return Group(
        start,
        slot,
        count,
        width,
        rows,
        length,
        additive,
        False,
        torch.tensor(pad, device=device),
        torch.tensor(unpad, device=device),
    )


def _mask(run: list[Piece], width: int, length: int, device: torch.device, window: int | None) -> Tensor:
    """Visible KV rows [pieces, width, length]: everything before the piece, then ancestors and self among its own rows.

    Padded query rows see something, never nothing: a softmax over nothing is NaN.
    """
    base = torch.tensor([piece.base for piece in run], device=device)[:, None, None]
    column = torch.arange(length, device=device)
    if all(piece.parents is None for piece in run):
        position = base + torch.arange(width, device=device)[:, None]
        mask = column <= position
    else:
        nodes = max(piece.done + len(piece.tokens) for piece in run)
        path = torch.from_numpy(np.stack([_paths(piece, width, nodes) for piece in run])).to(device)
        own = (column - base).expand(-1, width, -1)
        mask = (own < 0) | ((own < nodes) & path.gather(2, own.clamp(0, nodes - 1)))
        position = base + (path.sum(-1, keepdim=True) - 1)
    if window is not None:  # a path's own rows lie right of their positions, so that none of them falls out of the window
        mask &= column > position - window
    return mask


def _paths(piece: Piece, width: int, nodes: int) -> NDArray[np.bool_]:
    """[width, nodes]: for each new node True at itself and at every ancestor; the last one's again as padding."""
    size = piece.done + len(piece.tokens)
    path = np.eye(size, dtype=bool)
    for node in range(1, size):
        path[node] |= path[node - 1 if piece.parents is None else piece.parents[node - 1]]
    padded = np.zeros((width, nodes), dtype=bool)
    padded[: len(piece.tokens), :size] = path[piece.done :]
    padded[len(piece.tokens) :] = padded[len(piece.tokens) - 1]
    return padded
