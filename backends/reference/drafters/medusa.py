"""Medusa: every head guesses one token further ahead from the same hidden state; no keys, no values, one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from backends.reference.drafters.choice import Choice, Where, chain
from backends.reference.drafters.tree import fixed_tree
from backends.reference.heads.medusa import Medusa
from backends.reference.sequence import Sequence
from backends.reference.verify import Draft


class MedusaHeads:
    """A chain of each head's best token, or a fixed tree over the `topk` best of each: `nodes` of them."""

    capture: tuple[int, ...] = ()

    def __init__(self, head: Medusa, choice: Choice, *, k: int, topk: int, nodes: int) -> None:
        self._head = head
        self._choice = choice
        self._topk = topk
        self._paths = fixed_tree(topk, k, nodes) if topk > 1 else []
        self._hidden: dict[int, tuple[Tensor, int]] = {}  # sequence id -> (final hidden states of a step, its last row there)

    @torch.inference_mode()
    def propose(self, work: list[tuple[Sequence, int]]) -> list[Draft]:
        live = [(sequence, limit) for sequence, limit in work if limit > 0]
        if not live:
            return [Draft()] * len(work)
        depth = max(limit for _, limit in live)
        hidden = torch.stack([states[row] for states, row in (self._hidden[s.id] for s, _ in live)])
        logits = self._head.logits(self._head(hidden)[:depth])
        where: list[Where] = [[(s.sampling, len(s.tokens), ahead) for s, _ in live] for ahead in range(depth)]
        make = self._chains if self._topk == 1 else self._trees
        drafts = make(live, logits, where)
        return [drafts.get(sequence.id, Draft()) for sequence, _ in work]

    def observe(self, sequence: Sequence, rows: list[int], hidden: Tensor, captured: list[Tensor]) -> None:
        self._hidden[sequence.id] = hidden, rows[-1]

    def adopt(self, sequence: Sequence, slot: int, rows: int) -> int:
        return rows

    def forget(self, sequence: Sequence) -> None:
        self._hidden.pop(sequence.id, None)

    def _chains(self, live: list[tuple[Sequence, int]], logits: Tensor, where: list[Where]) -> dict[int, Draft]:
        """`logits` [depth, live, draft vocabulary]."""
        levels = [self._choice.one(*level) for level in zip(logits, where, strict=True)]
        return {
            sequence.id: chain([tokens[i] for tokens, _ in levels[:limit]], [laws[i] for _, laws in levels[:limit]])
            for i, (sequence, limit) in enumerate(live)
        }

    def _trees(self, live: list[tuple[Sequence, int]], logits: Tensor, where: list[Where]) -> dict[int, Draft]:
        tokens = [self._choice.top(*level, self._topk)[1].tolist() for level in zip(logits, where, strict=True)]
        drafts = {}
        for i, (sequence, limit) in enumerate(live):
            paths = [path for path in self._paths if len(path) <= limit]
            number = {path: n for n, path in enumerate([(), *paths])}
            drafts[sequence.id] = Draft(
                tuple(tokens[len(path) - 1][i][path[-1]] for path in paths), tuple(number[path[:-1]] for path in paths)
            )
        return drafts
