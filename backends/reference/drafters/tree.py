"""Which nodes a tree of drafts keeps: chosen by the head's own probabilities, or fixed beforehand."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from backends.reference.verify import Draft

DECAY = 0.6
"""Chance that a fixed tree gives a further level, as published Medusa heads lose acceptance from head to head."""


class Pool:
    """Candidates of one sequence. A candidate's score is the log-probability of its path, so that no child beats its parent and
    the best so-and-so many are always a tree."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []  # -1: the root
        self._scores: list[float] = []

    def grow(self, parent: int, scores: list[float], tokens: list[int]) -> list[int]:
        """Add children with the given log-probabilities; their numbers."""
        above = self._scores[parent] if parent >= 0 else 0.0
        first = len(self.tokens)
        self.tokens += tokens
        self.parents += [parent] * len(tokens)
        self._scores += [above + score for score in scores]
        return list(range(first, len(self.tokens)))

    def best(self, nodes: Iterable[int], count: int) -> list[int]:
        """The `count` best of `nodes`, best first; of equals the earlier, which is never a child of the later."""
        return sorted(nodes, key=lambda node: (-self._scores[node], node))[:count]

    def draft(self, count: int) -> Draft:
        """The `count` best of all."""
        kept = sorted(self.best(range(len(self.tokens)), count))
        number = {node: i for i, node in enumerate(kept, 1)} | {-1: 0}
        return Draft(tuple(self.tokens[node] for node in kept), tuple(number[self.parents[node]] for node in kept))


def fixed_tree(topk: int, depth: int, nodes: int) -> list[tuple[int, ...]]:
    """The likeliest `nodes` paths of ranks (0: a level's best token), shorter ones before their continuations.

    Without measurements of the heads at hand, rank r is given a weight of 1 / (r + 1), as frequencies of words have it (Zipf), and
    each level `DECAY`. The weights only shape the tree: the text is the same under any.
    """
    paths: list[tuple[int, ...]] = []
    heap: list[tuple[float, tuple[int, ...]]] = [(-DECAY / (rank + 1), (rank,)) for rank in range(topk)]
    while heap and len(paths) < nodes:
        weight, path = heappop(heap)
        paths.append(path)
        if len(path) < depth:
            for rank in range(topk):
                heappush(heap, (weight * DECAY / (rank + 1), (*path, rank)))
    return sorted(paths, key=lambda path: (len(path), path))
