"""From a draft head's logits to draft tokens, in the target's ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.reference.sampling import DRAFT, TARGET, Sampling, log_exponential, probabilities, scores
from backends.reference.verify import Draft

Law = Tensor | None
Where = Sequence[tuple[Sampling, int, int]]
"""For each row its request's sampling, the position after the sequence's last token, and how far ahead of it a token is chosen."""


@dataclass(frozen=True, slots=True)
class Choice:
    """`token_map` int64 [draft vocabulary] gives the target's ids; None where the vocabularies are one. `rule` is one of
    `options.SAMPLINGS`.

    Under coupled verification a head draws with the target's own noise, so that it agrees more often. Under the others it draws
    with a stream of its own, keeping the distribution that each token of a chain was drawn from; trees take the most likely tokens.
    """

    vocab_size: int
    token_map: Tensor | None
    rule: str

    def one(self, logits: Tensor, where: Where) -> tuple[list[int], list[Law]]:
        """A token for each row of [n, draft vocabulary], and what it was drawn from, [vocabulary], unless coupled."""
        tokens = self._ids(self._scores(logits, where, noisy=True).argmax(-1)).tolist()
        laws = [
            None if self.rule == "coupled" or sampling.greedy else self._law(row, sampling)
            for row, (sampling, _, _) in zip(logits, where, strict=True)
        ]
        return tokens, laws

    def top(self, logits: Tensor, where: Where, k: int) -> tuple[Tensor, Tensor]:
        """For each row the `k` best tokens, best first: log-scores and ids, [n, k] both."""
        best = self._scores(logits, where, noisy=self.rule == "coupled").log_softmax(-1).topk(k)
        return best.values, self._ids(best.indices)

    def _ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.token_map is None else self.token_map[draft_ids]

    def _scores(self, logits: Tensor, where: Where, *, noisy: bool) -> Tensor:
        """[n, draft vocabulary] float32; the greatest is the token drawn, or the most likely one without noise."""
        logits = logits.float()
        if all(sampling.greedy for sampling, _, _ in where):
            return logits
        noise: dict[tuple[int, int, int], Tensor] = {}  # the same for all nodes of one depth
        rows = []
        for row, (sampling, position, ahead) in zip(logits, where, strict=True):
            if sampling.greedy:
                rows.append(row)
                continue
            cut = scores(row, sampling)
            if noisy:
                key = (sampling.seed, *self._stream(position, ahead))
                if key not in noise:
                    noise[key] = log_exponential(row.numel() if self.token_map is None else self.token_map, *key, row.device)
                cut = cut - noise[key]
            rows.append(cut)
        return torch.stack(rows)

    def _stream(self, position: int, ahead: int) -> tuple[int, int]:
        """Key of the noise: a position and a stream.

        A token refused one by one says nothing of those after it, whose noise may serve again in the next step. A block is judged
        as a whole, so that there each step needs noise of its own.
        """
        if self.rule == "block":
            return position, DRAFT + 4 * (ahead + 1)
        return position + ahead, TARGET if self.rule == "coupled" else DRAFT

    def _law(self, row: Tensor, sampling: Sampling) -> Tensor:
        law = probabilities(row.float(), sampling)
        if self.token_map is None:
            return law
        return torch.zeros(self.vocab_size, dtype=law.dtype, device=law.device).index_copy_(0, self.token_map, law)


def chain(tokens: Sequence[int], laws: Sequence[Law]) -> Draft:
    """Of what `Choice.one` gave for one sequence, position by position."""
    drawn = [law for law in laws if law is not None]
    return Draft(tuple(tokens), probabilities=torch.stack(drawn) if drawn else None)
