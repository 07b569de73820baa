"""Heads that draft one token after another from hidden states: EAGLE-1/2, EAGLE-3 and MTP modules, as chains or as trees.

In each step the head first takes in the tokens accepted by the target, with the target's hidden states (skipping that costs
acceptance, because rows computed from the head's own guesses would stay); the output of the last row gives the first draft token.
From there on it feeds on its own outputs.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from backends.reference.batch import Piece
from backends.reference.drafters.choice import Choice, Law, chain
from backends.reference.drafters.head_cache import Head, HeadCache, last_rows
from backends.reference.drafters.tree import Pool
from backends.reference.sequence import Sequence
from backends.reference.verify import Draft


class RecurrentHead(Head, Protocol):
    def recycle(self, output: Tensor) -> Tensor:
        """What takes the place of the target's hidden states in the row after."""
        ...


class Autoregressive:
    def __init__(
        self, head: RecurrentHead, cache: HeadCache, choice: Choice, *, capture: tuple[int, ...], topk: int, nodes: int
    ) -> None:
        """`capture` empty: the head reads the target's last hidden state. `topk` 1 is a chain; else `nodes` are drafted at most."""
        self.capture = capture
        self.cache = cache
        self._head = head
        self._choice = choice
        self._topk = topk
        self._nodes = nodes

    @torch.inference_mode()
    def propose(self, work: list[tuple[Sequence, int]]) -> list[Draft]:
        drafts: dict[int, Draft] = {}
        if due := self.cache.due(work):
            pieces, hidden = self.cache.next_rows([sequence for sequence, _ in due])
            output = self.cache.run(pieces, hidden)
            wanted = [(at, item) for at, item in zip(last_rows(pieces), due, strict=True) if item[1] > 0]
            if wanted:
                draft = self._chains if self._topk == 1 else self._trees
                drafts = draft([item for _, item in wanted], output[[at for at, _ in wanted]])
        return [drafts.get(sequence.id, Draft()) for sequence, _ in work]

    def observe(self, sequence: Sequence, rows: list[int], hidden: Tensor, captured: list[Tensor]) -> None:
        self.cache.observe(sequence, rows, captured or [hidden])

    def adopt(self, sequence: Sequence, slot: int, rows: int) -> int:
        return self.cache.adopt(sequence, slot, rows)

    def forget(self, sequence: Sequence) -> None:
        self.cache.forget(sequence)

    def _chains(self, live: list[tuple[Sequence, int]], output: Tensor) -> dict[int, Draft]:
        """`output` [live, hidden] of the last true rows."""
        tokens: dict[int, list[int]] = {sequence.id: [] for sequence, _ in live}
        laws: dict[int, list[Law]] = {sequence.id: [] for sequence, _ in live}
        depth = 0
        while live:
            where = [(s.sampling, len(s.tokens), depth) for s, _ in live]
            for (sequence, _), token, law in zip(live, *self._choice.one(self._head.logits(output), where), strict=True):
                tokens[sequence.id].append(token)
                laws[sequence.id].append(law)
            depth += 1
            going = [i for i, (_, limit) in enumerate(live) if limit > depth]
            if not going:
                break
            if len(going) < len(live):
                output, live = output[going], [live[i] for i in going]
            # the last true row is n - 2: a draft's own row is its position less one
            pieces = [Piece(s.slot, len(s.tokens) - 2 + depth, tokens[s.id][-1:]) for s, _ in live]
            output = self.cache.run(pieces, self._head.recycle(output))
        return {key: chain(tokens[key], laws[key]) for key in tokens}

    def _trees(self, live: list[tuple[Sequence, int]], output: Tensor) -> dict[int, Draft]:
        """Expand the `topk` best nodes of each level by their `topk` best tokens, then keep the best `nodes` of all (EAGLE-2, arXiv
        2406.16858, section 4). `output` [live, hidden] of the last true rows; the rows of a level's nodes follow in the cache."""
        k = self._topk
        pools = {sequence.id: Pool() for sequence, _ in live}
        level: dict[int, list[int]] = {}  # the level to expand, as numbers in the pool
        parents = {sequence.id: [0] * k for sequence, _ in live}  # of nodes in the cache, where the last true row is node 0
        best, ids = self._choice.top(self._head.logits(output), [(s.sampling, len(s.tokens), 0) for s, _ in live], k)
        for (sequence, _), scores, tokens in zip(live, best.tolist(), ids.tolist(), strict=True):
            level[sequence.id] = pools[sequence.id].grow(-1, scores, tokens)
        feed = self._head.recycle(output).repeat_interleave(k, 0)
        depth = 1
        while going := [i for i, (_, limit) in enumerate(live) if limit > depth]:
            if len(going) < len(live):
                feed = feed.unflatten(0, (-1, k))[going].flatten(0, 1)
                live = [live[i] for i in going]
            first = 1 + (depth - 1) * k  # number of the level's first node in the cache
            pieces = [
                Piece(s.slot, len(s.tokens) - 2, [pools[s.id].tokens[node] for node in level[s.id]], parents[s.id], first)
                for s, _ in live
            ]
            output = self.cache.run(pieces, feed)
            where = [(s.sampling, len(s.tokens), depth) for s, _ in live for _ in range(k)]
            best, ids = self._choice.top(self._head.logits(output), where, k)
            children = zip(best.unflatten(0, (-1, k)).tolist(), ids.unflatten(0, (-1, k)).tolist(), strict=True)
            rows: list[int] = []
            for i, ((sequence, _), (scores_of, tokens_of)) in enumerate(zip(live, children, strict=True)):
                pool, nodes = pools[sequence.id], level[sequence.id]
                grown = [n for node, *child in zip(nodes, scores_of, tokens_of, strict=True) for n in pool.grow(node, *child)]
                level[sequence.id] = pool.best(grown, k)
                expanded = [nodes.index(pool.parents[node]) for node in level[sequence.id]]
                parents[sequence.id] = parents[sequence.id] + [first + j for j in expanded]
                rows += [i * k + j for j in expanded]
            feed = self._head.recycle(output)[rows]
            depth += 1
        return {key: pool.draft(self._nodes) for key, pool in pools.items()}
