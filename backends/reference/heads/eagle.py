"""EAGLE-1/2 (arXiv 2401.15077, 2406.16858): autoregression on the target's last hidden state. EAGLE-2 changes only the tree."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backends.reference.heads.block import Attend, Block, Shape
from backends.reference.heads.last_stream import LastStreamHead


class Eagle(LastStreamHead):
    """One round of a chain: `forward` over the newly verified rows with the target's final hidden states, `logits` of the last row,
    then single rows with the output itself in their place."""

    def __init__(self, shape: Shape, *, layers: int, fc_bias: bool, embedding: Tensor, output: Tensor) -> None:
        """`embedding` [vocab, hidden]; `output` [vocab, hidden] is the target's LM head."""
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=fc_bias)
        self.blocks = nn.ModuleList(Block(shape, input_norm=layer > 0) for layer in range(layers))
        self._take_from_target(shape, embedding, output)

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
