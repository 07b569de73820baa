"""New tokens of several sequences as one flat batch, with what attention needs to know about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WIDE = 32
"""From this many new tokens on a piece is attended alone (a prefill chunk); below, neighbours share one padded call."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one sequence: its KV rows 0..base-1 are there, these go to rows base, base+1, ...

    `parents` makes them a tree: entry i is the index (in `tokens`) of the parent of token i + 1, always smaller than i + 1.
    None is a chain. A token sees rows below `base` and its own path from token 0; its position is base + depth.
    """

    slot: int
    base: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Pieces in neighbouring slots that are attended in one call, padded to `width` query rows each."""

    start: int  # first flat row
    slot: int
    count: int
    width: int
    length: int  # KV rows read
    mask: Tensor | None  # additive [count, 1, width, length]; None: causal over a KV that holds only this piece, or all visible
    causal: bool = False
    pad: Tensor | None = None  # [count × width] flat row for each padded row; None where nothing is padded
    unpad: Tensor | None = None  # [rows] padded row for each flat row


@dataclass(frozen=True, slots=True)
class Batch:
    """`token_ids`, `positions` and `rows` (flat KV rows) are [n]; pieces lie sorted by slot, `starts` says where."""

    token_ids: Tensor
    positions: Tensor
    rows: Tensor
    groups: tuple[Group, ...]
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
        rows += range(piece.slot * slot_rows + piece.base, piece.slot * slot_rows + piece.base + n)
        positions += range(piece.base, piece.base + n) if piece.parents is None else _depths(piece)
    return Batch(
        torch.tensor(tokens, device=device),
        torch.tensor(positions, device=device),
        torch.tensor(rows, device=device),
        tuple(_group(run, starts[run[0].slot], dtype, device, window) for run in _runs(pieces)),
        starts,
    )


def _depths(piece: Piece) -> list[int]:
    depths = [piece.base]
    for parent in piece.parents or ():
        depths.append(depths[parent] + 1)
    return depths


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
    width, count = max(widths), len(run)
    length = max(piece.base for piece in run) + width
    slot = run[0].slot
    narrow = window is None or length <= window
    if count == 1 and narrow and run[0].parents is None and (width == 1 or run[0].base == 0):
        return Group(start, slot, 1, width, length, None, causal=width > 1)
    mask = _mask(run, width, length, device, window)
    additive = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, float("-inf"))[:, None]
    if min(widths) == width:
        return Group(start, slot, count, width, length, additive)
    pad: list[int] = []
    unpad: list[int] = []
    first = 0
    for index, n in enumerate(widths):
        pad += [first + min(i, n - 1) for i in range(width)]
        unpad += range(index * width, index * width + n)
        first += n
    return Group(
        start, slot, count, width, length, additive, False, torch.tensor(pad, device=device), torch.tensor(unpad, device=device)
    )


def _mask(run: list[Piece], width: int, length: int, device: torch.device, window: int | None) -> Tensor:
    """Visible KV rows [pieces, width, length]: everything before the piece, then ancestors and self among its own rows."""
    base = torch.tensor([piece.base for piece in run], device=device)[:, None, None]
    column = torch.arange(length, device=device)
    own = torch.arange(width, device=device)
    if all(piece.parents is None for piece in run):
        mask = column <= base + own[:, None]
    else:
        path = torch.stack([_ancestors(piece, width) for piece in run]).to(device)
        mask = (column < base).expand(-1, width, -1).clone()
        mask.scatter_(2, (base + own).expand(-1, width, -1), path)
    if window is not None:  # draft rows of a tree lie at most its size further right than their position: chains are exact
        mask &= column > base + own[:, None] - window
    return mask


def _ancestors(piece: Piece, width: int) -> Tensor:
    """[width, width]: row i is True at i and at every ancestor of i."""
    path = torch.eye(width, dtype=torch.bool)
    for node in range(1, len(piece.tokens)):
        parent = node - 1 if piece.parents is None else piece.parents[node - 1]
        path[node] |= path[parent]
    return path
