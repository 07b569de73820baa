"""EAGLE-1/2 (arXiv 2401.15077, 2406.16858): autoregression on the target's last hidden state. EAGLE-2 changes only the tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from backends.reference.heads.block import Attend, Block, Rotary, Shape


class Eagle(nn.Module):
    """One round of a chain: `forward` over the newly verified rows with the target's final hidden states, `logits` of the last row,
    then single rows with the output itself in their place."""

    embedding: Tensor
    token_map: Tensor | None = None

    def __init__(self, shape: Shape, *, layers: int, fc_bias: bool, embedding: Tensor, output: Tensor) -> None:
        """`embedding` [vocab, hidden]; `output` [vocab, hidden] is the target's LM head."""
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=fc_bias)
        self.blocks = nn.ModuleList(Block(shape, input_norm=layer > 0) for layer in range(layers))
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.head.weight = nn.Parameter(output, requires_grad=False)
        self.rotary = Rotary(shape)
        self.register_buffer("embedding", embedding, persistent=False)

    def fuse(self, streams: Sequence[Tensor]) -> Tensor:
        """The target's final hidden state, the only stream this head reads."""
        return streams[0]

    def recycle(self, output: Tensor) -> Tensor:
        """What takes the place of the target's hidden state in the step after."""
        return output

    def embed(self, token_ids: Tensor) -> Tensor:
        """[...] -> [..., hidden]."""
        return self.embedding[token_ids]

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass.

        Args:
            embedded: `embed` of token t + 1 for row t, [..., hidden].
            hidden: the target's hidden state of token t *after* its last norm, or this head's output for the row before.
            positions: [...].

        Returns:
            [..., hidden]: a prediction of the target's hidden state of token t + 1.
        """
        rotary = self.rotary(positions)
        x = self.fc(torch.cat((embedded, hidden), -1))
        for layer, block in enumerate(self.blocks):
            x = block(x, rotary, layer, attend)
        return x

    def keys_values(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """k and v of the first block, for rows of a prompt whose output is not needed (a head of one block)."""
        return self.blocks[0].keys_values(self.fc(torch.cat((embedded, hidden), -1)), self.rotary(positions))  # type: ignore[operator]

    def logits(self, output: Tensor) -> Tensor:
        """[..., vocab], in the target's ids."""
        return self.head(output)
