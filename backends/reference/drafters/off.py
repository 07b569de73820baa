"""No speculation."""

from __future__ import annotations

from torch import Tensor

from backends.reference.sequence import Sequence
from backends.reference.verify import Draft


class Off:
    capture: tuple[int, ...] = ()

    def propose(self, work: list[tuple[Sequence, int]]) -> list[Draft]:
        return [Draft()] * len(work)

    def observe(self, sequence: Sequence, rows: list[int], hidden: Tensor, captured: list[Tensor]) -> None:
        pass

    def adopt(self, sequence: Sequence, slot: int, rows: int) -> int:
        return rows

    def forget(self, sequence: Sequence) -> None:
        pass
