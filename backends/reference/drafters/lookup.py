"""Drafts from the request's own tokens: what followed the same words before (`ngram`, `suffix`). No second model."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from backends.matchers import NgramIndex, SuffixIndex
from backends.reference.sequence import Sequence
from backends.reference.verify import Draft


class Lookup:
    """One index for each sequence; `new_index` is what tells the variants apart."""

    capture: tuple[int, ...] = ()

    def __init__(self, new_index: Callable[[], NgramIndex | SuffixIndex]) -> None:
        self._new_index = new_index
        self._indexes: dict[int, NgramIndex | SuffixIndex] = {}

    def propose(self, work: list[tuple[Sequence, int]]) -> list[Draft]:
        return [Draft(tuple(self._index(sequence).propose(limit))) for sequence, limit in work]

    def observe(self, sequence: Sequence, rows: list[int], hidden: Tensor, captured: list[Tensor]) -> None:
        pass

    def adopt(self, sequence: Sequence, slot: int, rows: int) -> int:
        return rows

    def forget(self, sequence: Sequence) -> None:
        self._indexes.pop(sequence.id, None)

    def _index(self, sequence: Sequence) -> NgramIndex | SuffixIndex:
        if sequence.id not in self._indexes:
            self._indexes[sequence.id] = self._new_index()
        index = self._indexes[sequence.id]
        index.extend(sequence.tokens[len(index) :])
        return index
