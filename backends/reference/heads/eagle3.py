"""EAGLE-3 (arXiv 2503.01840): one block over the token's embedding and a fusion of the target's low, middle and high streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from backends.reference.heads.block import MLP, Attend, Attention, Block, RMSNorm, Rotary, Shape


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """What differs between published heads.

    norm_before_residual: the residual is the normed fused hidden (speculators' default), else the raw one (official).
    norm_before_fc: one RMSNorm over the concatenated streams. fc_norm: one for each stream. norm_output: the next step is fed the
    normed output (EAGLE-3.1), else the raw one.
    """

    streams: int = 3
    layers: int = 1
    draft_vocab: int = 0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    fc_bias: bool = False
    norm_output: bool = False


class FirstBlock(nn.Module):
    """EAGLE-3's block: attends from [normed embedding, normed hidden], 2 × hidden wide; the residual is the hidden alone."""

    def __init__(self, shape: Shape, *, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_norm = RMSNorm(shape.hidden, shape.rms_eps)  # of the embedding
        self.hidden_norm = RMSNorm(shape.hidden, shape.rms_eps)
        self.attention = Attention(shape, 2 * shape.hidden)
        self.post_norm = RMSNorm(shape.hidden, shape.rms_eps)
        self.mlp = MLP(shape)

    def inputs(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """What is attended from: [..., 2 × hidden]."""
        return torch.cat((self.input_norm(embedded), self.hidden_norm(hidden)), -1)

    def forward(self, embedded: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Both [..., hidden] -> [..., hidden]."""
        inputs = self.inputs(embedded, hidden)
        residual = inputs.chunk(2, -1)[1] if self.norm_before_residual else hidden
        x = residual + self.attention(inputs, rotary, 0, attend)
        return x + self.mlp(self.post_norm(x))


class Eagle3(nn.Module):
    """One round of a chain: `fuse` the streams of the newly verified tokens, `forward` over those rows, `logits` of the last row;
    then `forward` on single rows with `recycle(output)` in the place of fused streams and the drafted token as the next one."""

    embedding: Tensor
    token_map: Tensor

    def __init__(self, shape: Shape, options: Eagle3Options, embedding: Tensor, token_map: Tensor) -> None:
        """`embedding` [vocab, hidden] is shared with the target or the head's own; `token_map` int64 [draft_vocab] gives the target's
        id of each draft id."""
        super().__init__()
        self.shape, self.options = shape, options
        width = options.streams * shape.target_hidden
        self.input_norm = RMSNorm(width, shape.rms_eps) if options.norm_before_fc else None
        self.stream_norms = (
            nn.ModuleList(RMSNorm(shape.target_hidden, shape.rms_eps) for _ in range(options.streams))
            if options.fc_norm
            else None
        )
        self.fc = nn.Linear(width, shape.hidden, bias=options.fc_bias)
        self.first = FirstBlock(shape, norm_before_residual=options.norm_before_residual)
        self.rest = nn.ModuleList(Block(shape) for _ in range(options.layers - 1))
        self.norm = RMSNorm(shape.hidden, shape.rms_eps)
        self.head = nn.Linear(shape.hidden, options.draft_vocab, bias=False)
        self.rotary = Rotary(shape)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("token_map", token_map, persistent=False)

    def fuse(self, streams: Sequence[Tensor]) -> Tensor:
        """The target's residual streams, low to high, [..., target_hidden] each -> [..., hidden]."""
        if self.stream_norms is not None:
            streams = [norm(stream) for norm, stream in zip(self.stream_norms, streams, strict=True)]
        x = torch.cat(tuple(streams), -1)
        return self.fc(x if self.input_norm is None else self.input_norm(x))

    def embed(self, token_ids: Tensor) -> Tensor:
        """[...] -> [..., hidden]."""
        return self.embedding[token_ids]

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass.

        Args:
            embedded: `embed` of token t + 1 for row t, [..., hidden].
            hidden: `fuse` of token t's streams, or `recycle` of the row before, [..., hidden].
            positions: [...].

        Returns:
            [..., hidden], for `logits` and `recycle`.
        """
        rotary = self.rotary(positions)
        x = self.first(embedded, hidden, rotary, attend)
        for layer, block in enumerate(self.rest, 1):
            x = block(x, rotary, layer, attend)
        return x

    def keys_values(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """k and v of the first block, for rows of a prompt whose output is not needed (a head of one block)."""
        return self.first.attention.keys_values(self.first.inputs(embedded, hidden), self.rotary(positions))

    def recycle(self, output: Tensor) -> Tensor:
        """What takes the place of fused streams in the step after."""
        return self.norm(output) if self.options.norm_output else output

    def logits(self, output: Tensor) -> Tensor:
        """[..., draft_vocab]; `target_ids` translates."""
        return self.head(self.norm(output))

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.token_map[draft_ids]
