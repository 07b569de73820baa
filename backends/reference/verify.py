"""Verification of drafts: how far the target goes along with one, and the token it adds. A chain is a tree of single children.

Three exact rules for sampling; for greedy decoding all are the same walk.

- coupled (`walk`): the target's own token at a node is a fixed function of its logits and of noise keyed by (seed, position,
  token). Go down while that token was drafted. What was drafted cannot change the text, only how many steps it takes.
- rejection (`reject`): accept a draft x with min(1, p(x) / q(x)), else go on with norm(max(0, p - q)) (Leviathan et al.,
  arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318). Children of a tree node are tried in order, each against what
  the ones before left (SpecInfer, arXiv 2305.09781).
- block (`block`), for chains: the same with one decision about the whole chain, which accepts as many tokens or more on average
  (Sun et al., arXiv 2403.10444).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.serving import TokenLogprob


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens; node 0 is the sequence's last token and node i + 1 is `tokens[i]`, a child of node `parents[i]` <= i.

    `parents` None is a chain. `probabilities` [tokens, vocab] is what each token was drawn from (float64, after temperature and
    cuts); None where the draft was not drawn: then q is 1 at the token.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    probabilities: Tensor | None = None

    def depths(self) -> list[int]:
        """Depth of each node, the root's 0 first."""
        if self.parents is None:
            return list(range(len(self.tokens) + 1))
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def children(self) -> list[list[int]]:
        """Child nodes of each node, in draft order."""
        if self.parents is None:
            return [[node + 1] for node in range(len(self.tokens))] + [[]]
        below: list[list[int]] = [[] for _ in range(len(self.tokens) + 1)]
        for node, parent in enumerate(self.parents, 1):
            below[parent].append(node)
        return below


@dataclass(frozen=True, slots=True)
class Verdict:
    """Accepted nodes from the root down, and the target's own token after them."""

    path: tuple[int, ...]
    token: int
    logprobs: tuple[TokenLogprob, ...] = ()  # of the emitted tokens, where the request asked


def walk(draft: Draft, chosen: Sequence[int]) -> Verdict:
    """Follow the target: `chosen[node]` is its token after `node`."""
    children = draft.children()
    path: list[int] = []
    node = 0
    while (below := next((child for child in children[node] if draft.tokens[child - 1] == chosen[node]), None)) is not None:
        path.append(below)
        node = below
    return Verdict(tuple(path), chosen[node])


def forced(draft: Draft, count: int, chosen: Sequence[int]) -> Verdict:
    """Accept `count` tokens of the draft's deepest branch (all of a shorter one), whatever the target says."""
    depths = draft.depths()
    node = depths.index(max(depths))
    path: list[int] = []
    while node > 0:
        path.insert(0, node)
        node = node - 1 if draft.parents is None else draft.parents[node - 1]
    path = path[:count]
    return Verdict(tuple(path), chosen[path[-1] if path else 0])


def reject(draft: Draft, target: Callable[[int], Tensor], coin: Callable[[int, int], float]) -> tuple[tuple[int, ...], Tensor]:
    """Accept or reject down the tree.

    Args:
        target: float64 probabilities [vocab] of the target after a node.
        coin: uniform in [0, 1) for (depth of the node, rank of the child tried).

    Returns:
        The accepted path, and the distribution [vocab] that the token after it is to be drawn from.
    """
    children = draft.children()
    path: list[int] = []
    node = 0
    while True:
        p = target(node)
        for rank, child in enumerate(children[node]):
            q = _drawn_from(draft, child, p)
            if coin(len(path), rank) < acceptance(p, q, draft.tokens[child - 1]):
                path.append(child)
                node = child
                break
            p = residual(p, q)
        else:
            return tuple(path), p


def block(draft: Draft, target: Callable[[int], Tensor], coin: Callable[[int], float]) -> tuple[tuple[int, ...], Tensor]:
    """As `reject`, for a chain as a whole: the longest prefix whose own coin falls below its chance."""
    chances, laws = block_chances(draft, target)
    length = next((n for n in range(len(chances), 0, -1) if coin(n) < chances[n - 1]), 0)
    return tuple(range(1, length + 1)), laws[length]


def block_chances(draft: Draft, target: Callable[[int], Tensor]) -> tuple[list[float], list[Tensor]]:
    """For prefixes of 1..K tokens the chance of each to be kept if no longer one was (h), and for 0..K tokens the distribution of
    the token after (arXiv 2403.10444, algorithm 2; `weight` is its p_i)."""
    weight, chances, laws = 1.0, [], []
    for node, token in enumerate(draft.tokens):
        p = target(node)
        q = _drawn_from(draft, node + 1, p)
        rest = (weight * p - q).clamp_min(0)
        more = float(rest.sum())
        if node > 0:
            chances.append(more / (more + 1 - weight) if more + 1 - weight > 0 else 1.0)
        laws.append(rest / more if more > 0 else p)
        weight = min(1.0, weight * float(p[token] / q[token])) if q[token] > 0 else 0.0
    return [*chances, weight], [*laws, target(len(draft.tokens))]


def acceptance(p: Tensor, q: Tensor, token: int) -> float:
    """min(1, p(x) / q(x)). A token with q(x) = 0 cannot have been drawn, so it is refused."""
    return min(1.0, float(p[token] / q[token])) if q[token] > 0 else 0.0


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p - q)). All zero only where p = q up to rounding, when rejection has probability 0: then p."""
    rest = (p - q).clamp_min(0)
    total = rest.sum()
    return rest / total if total > 0 else p


def _drawn_from(draft: Draft, child: int, p: Tensor) -> Tensor:
    if draft.probabilities is not None:
        return draft.probabilities[child - 1]
    q = torch.zeros_like(p)
    q[draft.tokens[child - 1]] = 1
    return q
