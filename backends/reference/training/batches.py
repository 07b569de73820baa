"""Batches of conversations for training and for the simulation of drafting, and the loss that both halves share."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.reference.training.distill import Distilled, Example
from backends.reference.training.rollout import Bases


@dataclass(frozen=True, slots=True)
class Batch:
    """Conversations padded to one length. Token t has row t of `streams`; the last token of each has none."""

    tokens: Tensor  # [sequences, length] int64
    streams: Tensor  # [sequences, length, 4, hidden] bf16: low, middle, high, final
    prompt: Tensor  # [sequences] tokens
    length: Tensor  # [sequences] tokens
    start: Tensor  # [sequences] first row that starts a draft

    def bases(self) -> Bases:
        """Rows b that start a draft: token b + 1 is known, and token b + 2 is there to be guessed."""
        at = torch.arange(self.tokens.shape[1])
        sequence, position = ((at >= self.start[:, None]) & (at <= self.length[:, None] - 3)).nonzero(as_tuple=True)
        return Bases(sequence, position)

    def prompt_rows(self) -> tuple[Tensor, Tensor]:
        """Sequence and position of the rows before any base."""
        at = torch.arange(self.tokens.shape[1])
        sequence, position = (at < self.start[:, None]).nonzero(as_tuple=True)
        return sequence, position


def batch(data: Distilled, examples: Sequence[Example], *, prompts: bool = False) -> Batch:
    """`prompts`: drafts start in the prompts too, after the first token, and not only in outputs."""
    longest = max(len(example.tokens) for example in examples)
    tokens = torch.zeros(len(examples), longest, dtype=torch.long)
    streams = torch.zeros(len(examples), longest, *data.features.shape[1:], dtype=torch.bfloat16)
    for i, example in enumerate(examples):
        tokens[i, : len(example.tokens)] = torch.tensor(example.tokens)
        streams[i, : example.rows] = data.hidden(example)
    prompt = torch.tensor([example.prompt_tokens for example in examples])
    length = torch.tensor([len(example.tokens) for example in examples])
    return Batch(tokens, streams, prompt, length, torch.ones_like(prompt) if prompts else prompt - 1)


def usable(examples: Sequence[Example]) -> list[Example]:
    """Those with at least three output tokens, so that there is a draft to check."""
    return [example for example in examples if len(example.tokens) - example.prompt_tokens >= 3]


def epoch(examples: Sequence[Example], rows: int, seed: int, *, prompts: bool = False) -> list[list[Example]]:
    """Groups of about `rows` tokens (output tokens without `prompts`), alike in length, in random order."""
    rng = random.Random(seed)

    def counted(example: Example) -> int:
        return len(example.tokens) - (0 if prompts else example.prompt_tokens)

    order = sorted(examples, key=lambda e: counted(e) * rng.uniform(0.8, 1.25))
    groups: list[list[Example]] = [[]]
    filled = 0
    for example in order:
        size = counted(example)
        if filled and filled + size > rows:
            groups.append([])
            filled = 0
        groups[-1].append(example)
        filled += size
    rng.shuffle(groups)
    return groups


def batches(data: Distilled, groups: Sequence[Sequence[Example]]) -> Iterator[Batch]:
    for group in groups:
        yield batch(data, group)


class FrozenHeadLoss(torch.autograd.Function):
    """Cross entropy against the target's distribution, through an LM head that is not trained.

    The gradient with respect to the head's input is formed with the loss, a few hundred rows at a time, so that logits over the
    draft vocabulary are never kept: softmax(logits) - p, times the LM head.
    """

    ROWS = 256

    @staticmethod
    def forward(ctx, x: Tensor, teacher: Tensor, output: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        """x [n, hidden]: normed outputs; teacher [n, hidden]: the target's final hidden states of the same tokens; output
        [vocab, hidden]; weight [n]. Returns the weighted sum of losses and the argmax of each row's logits."""
        gradient = torch.empty_like(x)
        total = x.new_zeros((), dtype=torch.float32)
        guesses = torch.empty(len(x), dtype=torch.long)
        for start in range(0, len(x), FrozenHeadLoss.ROWS):
            rows = slice(start, start + FrozenHeadLoss.ROWS)
            wanted = (teacher[rows].to(output.dtype) @ output.T).float().softmax(-1)
            logits = (x[rows].to(output.dtype) @ output.T).float()
            guesses[rows] = logits.argmax(-1)
            logs = logits.log_softmax(-1)
            scale = weight[rows, None]
            total += -((wanted * logs).sum(-1, keepdim=True) * scale).sum()
            difference = logs.exp_().sub_(wanted).mul_(scale)
            gradient[rows] = (difference.to(output.dtype) @ output).to(x.dtype)
        ctx.save_for_backward(gradient)
        return total, guesses

    @staticmethod
    def backward(ctx, total: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]
        (gradient,) = ctx.saved_tensors
        return gradient * total, None, None, None
