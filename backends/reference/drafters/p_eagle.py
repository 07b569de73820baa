"""P-EAGLE: all K draft tokens in one pass of the head (`heads/p_eagle.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from backends.reference.batch import Piece
from backends.reference.drafters.choice import Choice, chain
from backends.reference.drafters.head_cache import HeadCache
from backends.reference.heads.p_eagle import PEagle
from backends.reference.sequence import Sequence
from backends.reference.verify import Draft


class Parallel:
    """The rows that a sequence lacks, then K - 1 mask rows: the last true row gives draft 1, the mask rows give the others."""

    def __init__(self, head: PEagle, cache: HeadCache, choice: Choice, *, capture: tuple[int, ...]) -> None:
        self.capture = capture
        self.cache = cache
        self._head = head
        self._choice = choice

    @torch.inference_mode()
    def propose(self, work: list[tuple[Sequence, int]]) -> list[Draft]:
        due = self.cache.due(work)
        if not due:
            return [Draft()] * len(work)
        pieces, hidden = self.cache.next_rows([sequence for sequence, _ in due])
        masked = [
            Piece(piece.slot, piece.base, [*piece.tokens, *[0] * max(0, limit - 1)])
            for piece, (_, limit) in zip(pieces, due, strict=True)
        ]
        true: list[int] = []
        firsts, at = [], 0
        for piece, whole in zip(pieces, masked, strict=True):
            true += range(at, at + len(piece.tokens))
            firsts.append(true[-1])
            at += len(whole.tokens)
        fill = self._head.mask_rows(at)
        embedded, streams = (rows.clone() for rows in fill)
        embedded[true] = self._head.embed(torch.tensor([t for p in pieces for t in p.tokens], device=hidden.device))
        streams[true] = hidden
        output = self.cache.run(masked, streams, embedded)
        drafts = self._drafts(due, output, firsts)
        return [drafts.get(sequence.id, Draft()) for sequence, _ in work]

    def observe(self, sequence: Sequence, rows: list[int], hidden: Tensor, captured: list[Tensor]) -> None:
        self.cache.observe(sequence, rows, captured)

    def adopt(self, sequence: Sequence, slot: int, rows: int) -> int:
        return self.cache.adopt(sequence, slot, rows)

    def forget(self, sequence: Sequence) -> None:
        self.cache.forget(sequence)

    def _drafts(self, due: list[tuple[Sequence, int]], output: Tensor, firsts: list[int]) -> dict[int, Draft]:
        """`firsts`: for each sequence the row of `output` that gives draft 1; the others follow it."""
        rows = [first + ahead for first, (_, limit) in zip(firsts, due, strict=True) for ahead in range(limit)]
        if not rows:
            return {}
        where = [(s.sampling, len(s.tokens), ahead) for s, limit in due for ahead in range(limit)]
        tokens, laws = self._choice.one(self._head.logits(output[rows]), where)
        drafts, at = {}, 0
        for sequence, limit in due:
            drafts[sequence.id] = chain(tokens[at : at + limit], laws[at : at + limit])
            at += limit
        return drafts
