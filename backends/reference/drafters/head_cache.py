"""What a draft head keeps between steps: keys and values of its blocks, and the target's hidden states it has yet to take in.

Row t of a head holds the target's hidden state of token t and the embedding of token t + 1. A sequence of n tokens whose last one
the target has not run yet therefore has n - 1 rows. Rows of drafts come after them and are overwritten, with the target's hidden
states in the place of the head's own, once it is known which tokens were accepted.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from backends.reference.attention import attend
from backends.reference.batch import Piece, build_batch
from backends.reference.heads.block import Attend, Shape
from backends.reference.kv_cache import KVCache
from backends.reference.sequence import Sequence

PATIENCE = 256
"""Rows after which a head takes hidden states in although no draft is wanted (K = 0 at this batch size): a bound on memory."""


class HeadKV(NamedTuple):
    """A head's `KVShape`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class Head(Protocol):
    """A module of `backends.reference.heads` with blocks: see there for the arguments."""

    @property
    def shape(self) -> Shape: ...

    @property
    def token_map(self) -> Tensor | None: ...

    def fuse(self, streams: Seq[Tensor]) -> Tensor: ...

    def embed(self, token_ids: Tensor) -> Tensor: ...

    def __call__(self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor: ...

    def logits(self, output: Tensor) -> Tensor: ...


class HeadCache:
    """Everything runs in the order of slots: give sequences and pieces sorted by theirs."""

    def __init__(
        self,
        head: Head,
        shape: HeadKV,
        *,
        slots: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        stored: str,
    ) -> None:
        self._head = head
        self._dtype, self._device = dtype, device
        self._kv = KVCache(shape, slots=slots, rows=rows, dtype=dtype, device=device, stored=stored)
        self._taken = [0] * slots  # true rows in each slot
        # sequence id -> (the target's streams of a step, the sequence's rows there)
        self._waiting: dict[int, list[tuple[list[Tensor], list[int]]]] = {}

    def observe(self, sequence: Sequence, rows: list[int], streams: list[Tensor]) -> None:
        """The target ran `rows` of `streams`, [n, width] each: the sequence's next tokens."""
        self._waiting.setdefault(sequence.id, []).append((streams, rows))

    def adopt(self, sequence: Sequence, slot: int, rows: int) -> int:
        """As `Drafter.adopt`. Row t needs token t + 1 too, so that the last common token's row is another."""
        usable = min(max(0, rows - 1), self._taken[slot])
        self._kv.copy_rows(slot, sequence.slot, usable)
        self._taken[sequence.slot] = usable
        return usable

    def forget(self, sequence: Sequence) -> None:
        self._waiting.pop(sequence.id, None)

    def due(self, work: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """Those of (sequence, most draft tokens) that must catch up now, sorted by slot."""
        due = [(s, limit) for s, limit in work if limit > 0 or sum(len(rows) for _, rows in self._waiting[s.id]) > PATIENCE]
        return sorted(due, key=lambda item: item[0].slot)

    def next_rows(self, sequences: list[Sequence]) -> tuple[list[Piece], Tensor]:
        """The rows that each sequence lacks, as pieces, and the fused hidden states [n, hidden] for them. Counts them as taken."""
        pieces = []
        for sequence in sequences:
            taken = self._taken[sequence.slot]
            pieces.append(Piece(sequence.slot, taken, sequence.tokens[taken + 1 :]))
            self._taken[sequence.slot] = len(sequence.tokens) - 1
        return pieces, self._head.fuse(self._take(sequences))

    def run(self, pieces: list[Piece], hidden: Tensor, embedded: Tensor | None = None) -> Tensor:
        """Outputs [n, hidden] of the pieces' tokens; `embedded` stands in for theirs where there are no tokens."""
        kv = self._kv
        batch = build_batch(pieces, slot_rows=kv.rows, dtype=self._dtype, device=self._device)

        def attend_cached(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kv.write(layer, batch.rows, torch.stack((k, v), 1))
            return attend(q, batch, kv, layer)

        if embedded is None:
            embedded = self._head.embed(batch.token_ids)
        return self._head(embedded, hidden, batch.positions, attend_cached)

    def _take(self, sequences: list[Sequence]) -> list[Tensor]:
        """Streams [n, width] of what waits, one sequence after another; in steady decoding one gather a stream."""
        parts: list[tuple[list[Tensor], list[int]]] = []
        for sequence in sequences:
            for streams, rows in self._waiting.pop(sequence.id):
                if parts and parts[-1][0] is streams:
                    parts[-1][1].extend(rows)
                else:
                    parts.append((streams, [*rows]))
        gathered = [[stream[rows] for stream in streams] for streams, rows in parts]
        return gathered[0] if len(gathered) == 1 else [torch.cat(pieces) for pieces in zip(*gathered, strict=True)]


def last_rows(pieces: list[Piece]) -> list[int]:
    """Where the pieces' last tokens lie among all."""
    at, rows = -1, []
    for piece in pieces:
        at += len(piece.tokens)
        rows.append(at)
    return rows
