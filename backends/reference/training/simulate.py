"""What a head would reach: drafting simulated on recorded outputs of the target, exactly, for every start at once.

Under greedy decoding a draft is accepted as far as it repeats what the target said, and what the head knows at a position does not
depend on how decoding got there (true features replace its own once tokens are verified). So the length accepted from each position
is computed once, and the steps that decoding would take are a walk over those lengths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from backends.reference.training.batches import Batch, batch
from backends.reference.training.distill import Distilled, Example
from backends.reference.training.trainees import Trainee

ROWS = 1200  # tokens of a batch


@dataclass(slots=True)
class Acceptance:
    """Counts over decode steps; the first token of an output is not decoding's."""

    emitted: int = 0
    steps: int = 0
    accepted: list[int] = field(default_factory=list)  # steps in which draft position i was accepted

    @property
    def tau(self) -> float:
        return self.emitted / self.steps

    @property
    def position_rates(self) -> list[float]:
        return [count / self.steps for count in self.accepted]

    def as_dict(self) -> dict[str, object]:
        return {
            "tau": round(self.tau, 4),
            "position_rates": [round(rate, 4) for rate in self.position_rates],
            "steps": self.steps,
        }


@torch.no_grad()
def simulate(
    trainee: Trainee, data: Distilled, examples: Sequence[Example], output: Tensor, token_map: Tensor | None, k: int
) -> dict[str, Acceptance]:
    """Greedy acceptance with K = `k`, by category and over `all`.

    Args:
        output: the LM head that drafts are read from, [draft_vocab, hidden].
        token_map: the target's id of each of its rows; None where they are the target's own.
    """
    counts: dict[str, Acceptance] = defaultdict(lambda: Acceptance(accepted=[0] * k))
    group: list[Example] = []
    for i, example in enumerate(examples):
        group.append(example)
        if sum(len(e.tokens) for e in group) >= ROWS or i == len(examples) - 1:
            lengths = accepted_lengths(trainee, batch(data, group), output, token_map, k)
            for example_lengths, each in zip(lengths, group, strict=True):
                for name in (each.category, "all"):
                    _walk(counts[name], example_lengths, len(each.tokens), each.prompt_tokens, k)
            group = []
    return dict(counts)


def accepted_lengths(trainee: Trainee, data: Batch, output: Tensor, token_map: Tensor | None, k: int) -> Tensor:
    """[sequences, length]: how many of K drafts from each base are what the target said; 0 where there is no base."""
    lengths = torch.zeros(data.tokens.shape, dtype=torch.long)
    passes = trainee.passes(data)
    x, bases = next(passes)
    for step in range(k):
        if not len(x):
            break
        at = bases.position + 2 + step
        inside = at < data.length[bases.sequence]
        truth = data.tokens[bases.sequence, at.clamp_max(data.tokens.shape[1] - 1)]
        guesses = (x.to(output.dtype) @ output.T).argmax(-1)
        right = inside & ((guesses if token_map is None else token_map[guesses]) == truth)
        lengths[bases.sequence[right], bases.position[right]] += 1
        if step == k - 1 or not bool(right.any()):
            break
        x, bases = passes.send(right.nonzero().flatten())
    passes.close()
    return lengths


def _walk(counts: Acceptance, lengths: Tensor, total: int, prompt: int, k: int) -> None:
    """Decode: base b knows tokens up to b + 1; a step emits what was accepted and one more."""
    base = prompt - 1
    while base + 2 < total:
        accepted = min(int(lengths[base]), total - base - 2)
        emitted = min(accepted + 1, total - base - 2)
        counts.steps += 1
        counts.emitted += emitted
        for position in range(accepted):
            counts.accepted[position] += 1
        base += emitted
