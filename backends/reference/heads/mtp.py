"""Multi-token-prediction modules as DeepSeek-V3 (arXiv 2412.19437, section 2.2) and MiMo have them, over a dense block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from backends.reference.heads.block import Attend, Block, RMSNorm, Shape
from backends.reference.heads.last_stream import LastStreamHead


class MtpModule(nn.Module):
    """Norms of embedding and hidden state, a projection of both, one block, a final norm. `embedding_first` is the order in which the
    projection's input is concatenated: it differs between families, and the loader settles it."""

    def __init__(self, shape: Shape, *, embedding_first: bool, bias: bool, head_norms: bool) -> None:
        super().__init__()
        self.embedding_first = embedding_first
        self.embedding_norm = RMSNorm(shape.hidden, shape.rms_eps)
        self.hidden_norm = RMSNorm(shape.hidden, shape.rms_eps)
        self.project = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.block = Block(shape, bias=bias, head_norms=head_norms)
        self.norm = RMSNorm(shape.hidden, shape.rms_eps)

    def inputs(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """What the block is given: [..., hidden]."""
        parts = self.embedding_norm(embedded), self.hidden_norm(hidden)
        return self.project(torch.cat(parts if self.embedding_first else parts[::-1], -1))

    def forward(self, embedded: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], layer: int, attend: Attend) -> Tensor:
        return self.norm(self.block(self.inputs(embedded, hidden), rotary, layer, attend))

    def keys_values(self, embedded: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.block.keys_values(self.inputs(embedded, hidden), rotary)


class Mtp(LastStreamHead):
    """One round: `forward` over the newly verified rows, `logits` of the last row; then single rows with the output in the place of
    the target's hidden state. Module i serves draft i; with fewer modules than drafts the last one is used again."""

    def __init__(
        self,
        shape: Shape,
        *,
        modules: int,
        embedding_first: bool,
        zero_first_embedding: bool,
        bias: bool,
        head_norms: bool,
        embedding: Tensor,
        output: Tensor,
    ) -> None:
        """`zero_first_embedding`: the row at position 0 gets a zero embedding, as DeepSeek-V3 and MiMo are run."""
        super().__init__()
        self.zero_first_embedding = zero_first_embedding
        self.modules_ = nn.ModuleList(
            MtpModule(shape, embedding_first=embedding_first, bias=bias, head_norms=head_norms) for _ in range(modules)
        )
        self._take_from_target(shape, embedding, output)

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend, *, module: int = 0) -> Tensor:
        """One pass of one module; `attend` is called with `layer` = the module's number, since each has keys and values of its own.

        Args:
            embedded: `embed` of token t + 1 for row t, [..., hidden].
            hidden: the target's hidden state of token t after its last norm, or this head's output for the row before.
            positions: [...].

        Returns:
            [..., hidden], after the module's final norm: for `logits`, and for the next draft.
        """
        if self.zero_first_embedding:
            embedded = embedded.masked_fill((positions == 0).unsqueeze(-1), 0)
        at = min(module, len(self.modules_) - 1)
        return self.modules_[at](embedded, hidden, self.rotary(positions), at, attend)

    def keys_values(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """k and v of the first module, for rows of a prompt whose output is not needed."""
        if self.zero_first_embedding:
            embedded = embedded.masked_fill((positions == 0).unsqueeze(-1), 0)
        return self.modules_[0].keys_values(embedded, hidden, self.rotary(positions))  # type: ignore[operator]
