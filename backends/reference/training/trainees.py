"""How each variant drafts from every position of a batch at once: what training and the simulation of acceptance both run.

A trainee's `passes` is a generator. Each turn yields the LM head's input [n, hidden] for the next draft token of the n drafts that are
left, and is sent which of them go on. So a draft that went wrong costs nothing further, in training as in the simulation, and the
later steps see what they will see in use: the states of drafts that were right so far.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from backends.reference.config import ModelConfig
from backends.reference.heads.block import Attend, Block, RMSNorm, Rotary, Shape, causal
from backends.reference.heads.eagle import Eagle
from backends.reference.heads.eagle3 import Eagle3, Eagle3Options
from backends.reference.heads.files import HeadFile, TargetWeights
from backends.reference.heads.layouts import block_names, read
from backends.reference.heads.load import load_head
from backends.reference.heads.medusa import Medusa
from backends.reference.heads.mtp import Mtp
from backends.reference.heads.p_eagle import PEagle
from backends.reference.training.batches import Batch
from backends.reference.training.rollout import Bases, Rollout
from backends.types import ConfigError

Passes = Generator[tuple[Tensor, Bases], Tensor, None]


class Trainee(Protocol):
    """`module` is what is trained, `steps` how many draft tokens are trained for."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def steps(self) -> int: ...

    def passes(self, batch: Batch) -> Passes: ...


def shape_of(config: ModelConfig) -> Shape:
    """Blocks as wide as the target's own."""
    return Shape(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_eps=config.rms_eps,
        rope=config.rope,
        positions=config.context_tokens,
        target_hidden=config.hidden_size,
        vocab=config.vocab_size,
    )


@dataclass
class Chain:
    """EAGLE-3, EAGLE-1/2 and MTP: one row after another, each fed the output of the one before.

    features: the head's view of true rows, from streams [n, 4, hidden] to [n, hidden].
    """

    module: Eagle3 | Eagle | Mtp
    steps: int
    features: Callable[[Tensor], Tensor]
    recycle: Callable[[Tensor], Tensor]
    output: Callable[[Tensor], Tensor]

    def passes(self, batch: Batch) -> Passes:
        bases = batch.bases()
        rollout = Rollout(bases, *batch.tokens.shape)
        head = self.module
        sequence, position = batch.prompt_rows()
        embedded = head.embed(batch.tokens[sequence, position + 1])
        k, v = head.keys_values(embedded, self.features(batch.streams[sequence, position]), position)
        rollout.add_context(0, sequence, position, k, v)
        hidden = self.features(batch.streams[bases.sequence, bases.position])
        attend: Attend = rollout.first
        step = 0
        while True:
            at = rollout.bases
            embedded = head.embed(batch.tokens[at.sequence, at.position + 1 + step])
            y = head(embedded, hidden, at.position + step, attend)
            keep = yield self.output(y), at
            rollout.narrow(keep)
            hidden, attend, step = self.recycle(y)[keep], rollout.further, step + 1


@dataclass
class Parallel:
    """P-EAGLE: mask rows after the true one. Attention is causal, so row by row is the same as all in one pass."""

    module: PEagle
    steps: int
    features: Callable[[Tensor], Tensor]

    def passes(self, batch: Batch) -> Passes:
        head, body = self.module, self.module.body
        rollout = Rollout(batch.bases(), *batch.tokens.shape)
        y = self._true_rows(batch, rollout)
        step = 0
        while True:
            keep = yield body.norm(y), rollout.bases
            rollout.narrow(keep)
            step += 1
            n = len(rollout.bases.position)
            embedded, hidden = head.mask_rows(n)
            y = head(embedded, hidden, rollout.bases.position + step, rollout.further)

    def _true_rows(self, batch: Batch, rollout: Rollout) -> Tensor:
        """Every row of the sequences through all blocks, since later blocks attend to earlier ones' outputs in the prompt too."""
        bases = rollout.bases
        sequence, position = (
            torch.cat(pair) for pair in zip(batch.prompt_rows(), (bases.sequence, bases.position), strict=True)
        )
        order = (sequence * batch.tokens.shape[1] + position).argsort()
        sequence, position = sequence[order], position[order]
        everything = Rollout(Bases(sequence, position), *batch.tokens.shape)
        embedded = self.module.embed(batch.tokens[sequence, position + 1])
        y = self.module(embedded, self.features(batch.streams[sequence, position]), position, everything.first)
        rollout.share_context(everything)
        starts = torch.zeros(batch.tokens.shape, dtype=torch.bool)
        starts[bases.sequence, bases.position] = True
        return y[starts[sequence, position]]


@dataclass
class Heads:
    """Medusa: nothing but the target's hidden state of the base row."""

    module: Medusa
    steps: int

    def passes(self, batch: Batch) -> Passes:
        bases = batch.bases()
        hidden = batch.streams[bases.sequence, bases.position, 3].to(self.module.blocks[0][0].weight.dtype)  # type: ignore[index]
        for head in range(len(self.module.blocks)):
            keep = yield self.module.head_output(head, hidden), bases
            hidden, bases = hidden[keep], bases.narrow(keep)


class SmallModel(nn.Module):
    """A plain decoder of a few blocks under the target's embedding and LM head."""

    embedding: Tensor

    def __init__(self, shape: Shape, layers: int, target: TargetWeights) -> None:
        super().__init__()
        self.shape = shape
        self.blocks = nn.ModuleList(Block(shape) for _ in range(layers))
        self.norm = RMSNorm(shape.hidden, shape.rms_eps)
        self.rotary = Rotary(shape)
        self.register_buffer("embedding", target.embedding, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[sequences, length] -> normed hidden states [sequences, length, hidden]."""
        rotary = self.rotary(torch.arange(tokens.shape[1]))
        x = self.embedding[tokens]
        for layer, block in enumerate(self.blocks):
            x = block(x, rotary, layer, causal())
        return self.norm(x)


@dataclass
class Distilled:
    """A draft model: while a draft is right, its rows are those of the true sequence."""

    module: SmallModel
    steps: int

    def passes(self, batch: Batch) -> Passes:
        hidden = self.module(batch.tokens)
        bases = batch.bases()
        step = 0
        while True:
            keep = yield hidden[bases.sequence, bases.position + 1 + step], bases
            bases = bases.narrow(keep)
            step += 1


def build(variant: str, target: TargetWeights, token_map: Tensor, scale: Tensor, *, mask_token: int = 0) -> Trainee:
    """A fresh trainee, its blocks started from the target's last one (a draft model's from its first and last ones).

    Args:
        token_map: [draft_vocab] target ids, for heads with a reduced vocabulary.
        scale: [3 × hidden], the usual size of each input of EAGLE-3's fc. Streams have a few dimensions hundreds of times larger than
            the rest, on which Adam's equal steps would be far too large; training divides by it, `finished` folds it into fc.
    """
    return BUILDERS[variant](target, token_map, scale, mask_token)


def start_from(trainee: Trainee, folder: Path, target: TargetWeights, scale: Tensor) -> None:
    """Start a P-EAGLE head from an EAGLE-3 head: what is drafted first is then right at once, and further blocks add nothing yet.

    Raises:
        ConfigError: `trainee` is another head, or the two have another vocabulary.
    """
    head = trainee.module
    loaded = load_head(folder, target, "eagle3").head
    if not isinstance(head, PEagle) or not isinstance(loaded, Eagle3) or not torch.equal(loaded.token_map, head.body.token_map):
        raise ConfigError(f"only a P-EAGLE head starts from another head, {folder}, and of the same draft vocabulary")
    state = {f"body.{name}": tensor.float() for name, tensor in loaded.state_dict().items() if name != "head.weight"}
    head.load_state_dict(_scaled(trainee, {**head.state_dict(), **state}, scale) | {"mask_hidden": head.mask_hidden.detach()})
    for block in head.body.rest:
        nn.init.zeros_(block.attention.out.weight)  # type: ignore[arg-type, union-attr]
        nn.init.zeros_(block.mlp.down.weight)  # type: ignore[arg-type, union-attr]


def finished(trainee: Trainee, scale: Tensor) -> dict[str, Tensor]:
    """The module's state as it is used: the scale of the inputs folded in."""
    state = {name: tensor.detach().clone() for name, tensor in trainee.module.state_dict().items()}
    return _scaled(trainee, state, 1 / scale)


def unfinished(trainee: Trainee, state: dict[str, Tensor], scale: Tensor) -> dict[str, Tensor]:
    """The inverse: a state as it is used, for the module in training."""
    return _scaled(trainee, dict(state), scale)


def _scaled(trainee: Trainee, state: dict[str, Tensor], factor: Tensor) -> dict[str, Tensor]:
    if isinstance(trainee.module, Eagle3):
        state["fc.weight"] = state["fc.weight"] * factor
    if isinstance(trainee.module, PEagle):
        state["body.fc.weight"] = state["body.fc.weight"] * factor
        state["mask_hidden"] = state["mask_hidden"] / factor
    return state


def _eagle3_module(target: TargetWeights, token_map: Tensor, layers: int) -> Eagle3:
    shape = shape_of(target.config)
    head = Eagle3(shape, Eagle3Options(layers=layers, draft_vocab=len(token_map)), target.embedding, token_map)
    block = _block_state(target, target.config.num_layers - 1)
    state = {f"first.{name}": tensor for name, tensor in block.items()}
    state["first.hidden_norm.weight"] = block["input_norm.weight"].clone()
    qkv = block["attention.qkv.weight"]
    state["first.attention.qkv.weight"] = torch.cat((torch.randn_like(qkv) * 0.02, qkv), -1)
    for layer in range(layers - 1):
        state |= {f"rest.{layer}.{name}": tensor for name, tensor in block.items()}
    state["norm.weight"] = target.norm
    head.load_state_dict(state, strict=False)
    head.head.weight = nn.Parameter(target.output[token_map], requires_grad=False)
    return head


def _start_fc(fc: nn.Linear, scale: Tensor) -> None:
    """The high stream as it is, a little of the others."""
    hidden = fc.out_features
    with torch.no_grad():
        fc.weight.normal_(std=0.02)
        fc.weight[:, -hidden:] += torch.diag(scale[-hidden:])


def _eagle3(target: TargetWeights, token_map: Tensor, scale: Tensor, _: int) -> Trainee:
    head = _eagle3_module(target, token_map, 1)
    _start_fc(head.fc, scale)
    dtype = target.embedding.dtype

    def features(streams: Tensor) -> Tensor:
        return head.fc((streams[:, :3].flatten(1).float() / scale).to(dtype))

    return Chain(head, 4, features, head.recycle, head.norm)


def _p_eagle(target: TargetWeights, token_map: Tensor, scale: Tensor, mask_token: int) -> Trainee:
    body = _eagle3_module(target, token_map, 2)
    _start_fc(body.fc, scale)
    head = PEagle(body.shape, body.options, target.embedding, token_map, target.embedding.float().mean(0))
    head.body = body
    nn.init.normal_(head.mask_hidden, std=0.3)  # in units of the scale
    dtype = target.embedding.dtype

    def features(streams: Tensor) -> Tensor:
        return body.fc((streams[:, :3].flatten(1).float() / scale).to(dtype))

    return Parallel(head, 5, features)


def _eagle2(target: TargetWeights, token_map: Tensor, scale: Tensor, _: int) -> Trainee:
    shape = shape_of(target.config)
    head = Eagle(shape, layers=1, fc_bias=False, embedding=target.embedding, output=target.output)
    # The target's last block, on states after the last norm instead of its stream: as large, and with that norm's weights, all through.
    block = _block_state(target, target.config.num_layers - 1)
    norm, size = target.norm.float(), scale[-shape.hidden :].square().mean().sqrt()
    block["attention.qkv.weight"] *= block.pop("input_norm.weight") / norm
    block["post_norm.weight"] *= norm.square().mean().sqrt() / norm
    for name in ("attention.out.weight", "mlp.down.weight"):
        block[name] *= norm[:, None] / size
    head.load_state_dict({f"blocks.0.{name}": tensor for name, tensor in block.items()}, strict=False)
    _start_projection(head.fc, shape.hidden, hidden_first=False)
    return Chain(head, 4, lambda s: s[:, 3].to(target.embedding.dtype), lambda y: y, lambda y: y)


def _mtp(target: TargetWeights, token_map: Tensor, scale: Tensor, _: int) -> Trainee:
    shape = shape_of(target.config)
    head = Mtp(
        shape,
        modules=1,
        embedding_first=False,
        zero_first_embedding=True,
        bias=False,
        head_norms=False,
        embedding=target.embedding,
        output=target.output,
    )
    block = _block_state(target, target.config.num_layers - 1)
    state = {f"modules_.0.block.{name}": tensor for name, tensor in block.items()}
    head.load_state_dict(state | {"modules_.0.norm.weight": target.norm}, strict=False)
    _start_projection(head.modules_[0].project, shape.hidden, hidden_first=True)  # type: ignore[arg-type]
    return Chain(head, 3, lambda s: s[:, 3].to(target.embedding.dtype), lambda y: y, lambda y: y)


def _start_projection(linear: nn.Linear, hidden: int, *, hidden_first: bool) -> None:
    """The hidden state as it is, a little of the embedding."""
    with torch.no_grad():
        linear.weight.normal_(std=0.02)
        linear.weight[:, :hidden] += torch.eye(hidden) if hidden_first else 0
        linear.weight[:, hidden:] += 0 if hidden_first else torch.eye(hidden)


def _medusa(target: TargetWeights, token_map: Tensor, scale: Tensor, _: int) -> Trainee:
    output = target.output[token_map]
    head = Medusa(hidden=target.config.hidden_size, heads=4, layers=1, outputs=[output], token_map=token_map)
    for parameter in (p for block in head.blocks for p in block.parameters()):
        nn.init.zeros_(parameter)
    return Heads(head, 4)


def _draft_model(target: TargetWeights, token_map: Tensor, scale: Tensor, _: int) -> Trainee:
    layers = (0, 1, target.config.num_layers - 1)
    model = SmallModel(shape_of(target.config), len(layers), target)
    state = {f"blocks.{i}.{n}": t for i, layer in enumerate(layers) for n, t in _block_state(target, layer).items()}
    model.load_state_dict(state | {"norm.weight": target.norm}, strict=False)
    return Distilled(model, 4)


def _block_state(target: TargetWeights, layer: int) -> dict[str, Tensor]:
    """One of the target's blocks under our names, float32."""
    prefix = f"model.layers.{layer}."
    file = HeadFile(target.folder, prefix)
    return {name: t.float() for name, t in read(file, block_names("", prefix, shape_of(target.config))).items()}


BUILDERS: dict[str, Callable[[TargetWeights, Tensor, Tensor, int], Any]] = {
    "eagle3": _eagle3,
    "eagle2": _eagle2,
    "medusa": _medusa,
    "p_eagle": _p_eagle,
    "mtp": _mtp,
    "draft_model": _draft_model,
}
