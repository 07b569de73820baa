"""Attention in training, where every position starts a draft of its own (training-time test, EAGLE-3 section 3.2).

Row b of the first pass is the head's view of the true sequence. A draft that starts there goes on with rows at b + 1, b + 2, ...,
each of which sees the true rows up to b and the draft's own rows, never another draft's. Instead of a sequence K times as long,
attention to the true rows is one masked product and attention to the own rows a few dot products, merged by their normalisers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Bases:
    """Rows that start a draft: `sequence` [n] in the batch, ascending, and `position` [n]."""

    sequence: Tensor
    position: Tensor

    def narrow(self, keep: Tensor) -> Bases:
        return Bases(self.sequence[keep], self.position[keep])


class Rollout:
    """An `attend` for flat rows [n]: the first pass, then one call for each further step of the drafts."""

    def __init__(self, bases: Bases, sequences: int, length: int) -> None:
        self.bases = bases
        self._sequences = sequences
        self._length = length
        self._context: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> true keys and values [sequences, length, kv_heads, dim]
        self._own: dict[
            int, list[tuple[Tensor, Tensor]]
        ] = {}  # layer -> one (k, v) [n, kv_heads, dim] for each step of the drafts

    def add_context(self, layer: int, sequence: Tensor, position: Tensor, k: Tensor, v: Tensor) -> None:
        """True rows that start no draft: k and v [m, kv_heads, dim]."""
        keys, values = self._context.get(layer) or self._empty(k)
        at = (sequence, position)
        self._context[layer] = keys.index_put(at, k), values.index_put(at, v)

    def share_context(self, other: Rollout) -> None:
        """Take over the true rows that another rollout has seen."""
        self._context = other._context

    def first(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The pass over the true rows themselves."""
        self.add_context(layer, self.bases.sequence, self.bases.position, k, v)
        out, _ = self._to_context(layer, q)
        return out

    def further(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The next step of every draft that is left."""
        own = self._own.setdefault(layer, [])
        own.append((k, v))
        return self.merged(layer, q, own)

    def merged(self, layer: int, q: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attention to the true rows up to the base and to `own` rows, [n, heads, dim]."""
        out, normaliser = self._to_context(layer, q)
        keys = torch.stack([key for key, _ in own], 1)  # [n, steps, kv_heads, dim]
        values = torch.stack([value for _, value in own], 1)
        share = q.shape[1] // keys.shape[2]
        grouped = q.unflatten(1, (-1, share)).float()
        scores = torch.einsum("ngsd,nkgd->nkgs", grouped, keys.float()).flatten(2) / math.sqrt(q.shape[-1])  # [n, steps, heads]
        total = torch.logaddexp(normaliser, scores.logsumexp(1))
        mine = (scores - total[:, None]).exp().unflatten(2, (-1, share))
        summed = torch.einsum("nkgs,nkgd->ngsd", mine, values.float()).flatten(1, 2)
        return (out * (normaliser - total).exp()[..., None] + summed).to(q.dtype)

    def narrow(self, keep: Tensor) -> None:
        """Go on with some of the drafts: indices or flags into the rows of the step before."""
        self.bases = self.bases.narrow(keep)
        self._own = {layer: [(k[keep], v[keep]) for k, v in steps] for layer, steps in self._own.items()}

    def _empty(self, k: Tensor) -> tuple[Tensor, Tensor]:
        return (k.new_zeros(self._sequences, self._length, *k.shape[1:]),) * 2

    def _to_context(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Attention to true rows up to the base: out [n, heads, dim] in float32 and log of the normaliser [n, heads]."""
        keys, values = self._context[layer]
        sequence, position = self.bases.sequence, self.bases.position
        n, heads, dim = q.shape
        kv_heads = keys.shape[2]
        counts = torch.bincount(sequence, minlength=self._sequences)
        slot = torch.arange(n) - (counts.cumsum(0) - counts)[sequence]
        width = int(counts.max())
        padded = q.new_zeros(self._sequences, width, heads, dim).index_put((sequence, slot), q)
        until = position.new_zeros(self._sequences, width).index_put((sequence, slot), position)
        grouped = padded.view(self._sequences, width, kv_heads, heads // kv_heads, dim)
        scores = torch.einsum("bwgsd,btgd->bgswt", grouped, keys).float() / math.sqrt(dim)
        hidden = torch.arange(self._length) > until[:, None, None, :, None]
        scores = scores.masked_fill(hidden, -math.inf)
        normaliser = scores.logsumexp(-1)
        weights = (scores - normaliser[..., None]).exp().to(values.dtype)
        out = torch.einsum("bgswt,btgd->bwgsd", weights, values).flatten(2, 3)
        at = (sequence, slot)
        return out[at].float(), normaliser.permute(0, 3, 1, 2).flatten(2)[at]
