"""What the engine asks of a drafter."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from backends.reference.sequence import Sequence
from backends.reference.verify import Draft


class Drafter(Protocol):
    """Proposes what comes next. Whatever it proposes, the text stays right; only the number of steps depends on it.

    `capture` names the residual streams of the target that it wants to see: i is the stream after i blocks.
    """

    capture: tuple[int, ...]

    def propose(self, work: list[tuple[Sequence, int]]) -> list[Draft]:
        """A draft of at most the given number of tokens for each decoding sequence; an empty one is fine."""
        ...

    def observe(self, sequence: Sequence, rows: list[int], hidden: Tensor, captured: list[Tensor]) -> None:
        """Called after each step, once for each sequence in it. `hidden` (final, after the last norm) and each captured stream
        are [n, hidden] for the whole step; `rows` are those of the sequence's newly computed tokens, in order, rejected drafts
        left out. `sequence.tokens` already holds what the step emitted."""
        ...

    def adopt(self, sequence: Sequence, slot: int, rows: int) -> int:
        """Called when a sequence is given its slot, before its first step there. Its first `rows` tokens are those that `slot`
        (its own, perhaps) begins with: take over what is kept for them there.

        Returns for how many of them, at most `rows`, the drafter needs no `observe`.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence ended or lost its slot."""
        ...
