"""What heads that read only the target's final hidden state have in common."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from backends.reference.heads.block import Rotary, Shape


class LastStreamHead(nn.Module):
    """A head whose next step takes its own output in the place of the target's hidden state, over the target's full vocabulary."""

    embedding: Tensor
    token_map: Tensor | None = None

    def _take_from_target(self, shape: Shape, embedding: Tensor, output: Tensor) -> None:
        """`embedding` [vocab, hidden]; `output` [vocab, hidden] is the target's LM head."""
        self.shape = shape
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

    def logits(self, output: Tensor) -> Tensor:
        """[..., vocab], in the target's ids."""
        return self.head(output)
