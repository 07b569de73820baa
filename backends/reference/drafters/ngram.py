"""Prompt lookup: propose what followed the last tokens when they occurred before."""

from __future__ import annotations

from torch import Tensor

from backends.matchers import NgramIndex
from backends.reference.sequence import Sequence
from backends.reference.verify import Draft


class Ngram:
    capture: tuple[int, ...] = ()

    def __init__(self, min_n: int, max_n: int) -> None:
        self._min_n = min_n
        self._max_n = max_n
        self._indexes: dict[int, NgramIndex] = {}

    def propose(self, work: list[tuple[Sequence, int]]) -> list[Draft]:
        return [Draft(tuple(self._index(sequence).propose(limit))) for sequence, limit in work]

    def observe(self, sequence: Sequence, rows: list[int], hidden: Tensor, captured: list[Tensor]) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        self._indexes.pop(sequence.id, None)

    def _index(self, sequence: Sequence) -> NgramIndex:
        index = self._indexes.setdefault(sequence.id, NgramIndex(self._min_n, self._max_n))
        index.extend(sequence.tokens[len(index) :])
        return index
