"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head of a few blocks that drafts all K tokens in one pass.

After the row of the last verified token come K - 1 rows that stand for tokens nobody knows yet: the embedding of a mask token, and
one learned vector in the place of the target's streams. Attention is causal over all rows. Keys and values of mask rows are worth
nothing afterwards: the next round overwrites them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from backends.reference.heads.block import Attend, Shape
from backends.reference.heads.eagle3 import Eagle3, Eagle3Options


class PEagle(nn.Module):
    """One round: rows of the newly verified tokens (`fuse`, `embed`), then `mask_rows(K - 1)`; `logits` of the last verified row and
    of the mask rows are the K drafts."""

    mask_embedding: Tensor

    def __init__(
        self, shape: Shape, options: Eagle3Options, embedding: Tensor, token_map: Tensor, mask_embedding: Tensor
    ) -> None:
        """`mask_embedding` [hidden]: the mask token's row."""
        super().__init__()
        self.body = Eagle3(shape, options, embedding, token_map)
        self.mask_hidden = nn.Parameter(torch.zeros(options.streams * shape.target_hidden))
        self.mask_embedding = nn.Parameter(mask_embedding.clone())

    def fuse(self, streams: Sequence[Tensor]) -> Tensor:
        return self.body.fuse(streams)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.body.embed(token_ids)

    def mask_rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Embedded and hidden, [count, hidden] each, of the rows after the verified ones."""
        shared = self.body.fuse(self.mask_hidden[None].chunk(self.body.options.streams, -1))
        return self.mask_embedding.expand(count, -1), shared.expand(count, -1)

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """As `Eagle3.forward`, all rows at once; mask rows have the positions that follow."""
        return self.body(embedded, hidden, positions, attend)

    def logits(self, output: Tensor) -> Tensor:
        """[..., draft_vocab]; `target_ids` translates."""
        return self.body.logits(output)

    @property
    def shape(self) -> Shape:
        return self.body.shape

    @property
    def token_map(self) -> Tensor:
        return self.body.token_map

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.body.target_ids(draft_ids)
