"""From a draft head's logits to draft tokens, in the target's ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.reference.sampling import DRAFT, TARGET, Sampling, log_exponential, probabilities, scores
from backends.reference.verify import Draft

Law = Tensor | None
Where = Sequence[tuple[Sampling, int]]
"""For each row its request's sampling and the position of the token to be chosen."""


@dataclass(frozen=True, slots=True)
class Choice:
    """`token_map` int64 [draft vocabulary] gives the target's ids; None where the vocabularies are one.

    Under coupled verification a head draws with the target's own noise, so that it agrees more often; under rejection with a
    stream of its own, keeping the distribution that each token of a chain was drawn from. Trees are not drawn under rejection:
    they take the most likely tokens.
    """

    vocab_size: int
    token_map: Tensor | None
    rejection: bool

    def one(self, logits: Tensor, where: Where) -> tuple[list[int], list[Law]]:
        """A token for each row of [n, draft vocabulary], and what it was drawn from, [vocabulary], under rejection."""
        drawn = self._scores(logits, where, DRAFT if self.rejection else TARGET)
        tokens = self._ids(drawn.argmax(-1)).tolist()
        laws = [
            self._law(row, sampling) if self.rejection and not sampling.greedy else None
            for row, (sampling, _) in zip(logits, where, strict=True)
        ]
        return tokens, laws

    def top(self, logits: Tensor, where: Where, k: int) -> tuple[Tensor, Tensor]:
        """For each row the `k` best tokens, best first: log-scores and ids, [n, k] both."""
        best = self._scores(logits, where, None if self.rejection else TARGET).log_softmax(-1).topk(k)
        return best.values, self._ids(best.indices)

    def _ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.token_map is None else self.token_map[draft_ids]

    def _scores(self, logits: Tensor, where: Where, stream: int | None) -> Tensor:
        """[n, draft vocabulary] float32; the greatest is the token drawn with the noise of `stream`, or the most likely one."""
        logits = logits.float()
        if all(sampling.greedy for sampling, _ in where):
            return logits
        noise: dict[tuple[int, int], Tensor] = {}  # the same for all nodes of one depth
        rows = []
        for row, (sampling, position) in zip(logits, where, strict=True):
            if sampling.greedy:
                rows.append(row)
                continue
            cut = scores(row, sampling)
            if stream is not None:
                key = sampling.seed, position
                if key not in noise:
                    ids = row.numel() if self.token_map is None else self.token_map
                    noise[key] = log_exponential(ids, *key, stream, row.device)
                cut = cut - noise[key]
            rows.append(cut)
        return torch.stack(rows)

    def _law(self, row: Tensor, sampling: Sampling) -> Tensor:
        law = probabilities(row.float(), sampling)
        if self.token_map is None:
            return law
        return torch.zeros(self.vocab_size, dtype=law.dtype, device=law.device).index_copy_(0, self.token_map, law)


def chain(tokens: Sequence[int], laws: Sequence[Law]) -> Draft:
    """Of what `Choice.one` gave for one sequence, position by position."""
    drawn = [law for law in laws if law is not None]
    return Draft(tuple(tokens), probabilities=torch.stack(drawn) if drawn else None)
