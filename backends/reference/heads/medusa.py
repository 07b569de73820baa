"""Medusa (arXiv 2401.10774): heads beside the LM head, each guessing one token further ahead from the same hidden state."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Medusa(nn.Module):
    """Head i, from 0, predicts token t + 2 + i from the target's final hidden state of token t."""

    token_map: Tensor

    def __init__(self, *, hidden: int, heads: int, layers: int, outputs: list[Tensor], token_map: Tensor) -> None:
        """`outputs` [draft_vocab, hidden]: one LM head for each head, or one for all. `token_map` int64 [draft_vocab] gives the
        target's ids."""
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers)) for _ in range(heads))
        self.heads = nn.ModuleList()
        for output in outputs:
            head = nn.Linear(hidden, output.shape[0], bias=False)
            head.weight = nn.Parameter(output, requires_grad=False)
            self.heads.append(head)
        self.register_buffer("token_map", token_map, persistent=False)

    def forward(self, hidden: Tensor) -> list[Tensor]:
        """The target's hidden state after its last norm [..., hidden] -> one [..., hidden] for each head, for `logits`."""
        return [self.head_output(head, hidden) for head in range(len(self.blocks))]

    def head_output(self, head: int, hidden: Tensor) -> Tensor:
        """One head's [..., hidden]."""
        for linear in self.blocks[head]:  # type: ignore[attr-defined]
            hidden = hidden + F.silu(linear(hidden))
        return hidden

    def logits(self, outputs: list[Tensor]) -> Tensor:
        """[heads, ..., draft_vocab]; `target_ids` translates. Heads that share an LM head are one product; the first few alone are fine."""
        if len(self.heads) == 1:
            together = torch.stack(outputs)
            return self.heads[0](together.flatten(0, -2)).unflatten(0, together.shape[:-1])
        return torch.stack([head(x) for head, x in zip(self.heads, outputs, strict=False)])

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.token_map[draft_ids]
