"""From published tensor names to the modules' own, and back: one table for each kind of block.

A table's entry is (ours, theirs): several of theirs are one fused weight of ours, concatenated by rows. Reading and writing use the
same tables, so what is written is what is read.
"""

from __future__ import annotations

from torch import Tensor

from backends.reference.heads.block import Shape
from backends.reference.heads.files import HeadFile

Names = list[tuple[str, tuple[tuple[str, tuple[int, ...]], ...]]]
"""[(our name, ((their name, shape), ...)), ...]"""


def block_names(
    ours: str,
    theirs: str,
    shape: Shape,
    *,
    inputs: int | None = None,
    input_norm: bool = True,
    bias: bool = False,
    head_norms: bool = False,
) -> Names:
    """One block; `inputs` is the width of what is attended from, the hidden size unless said."""
    width = inputs or shape.hidden
    projections = (
        ("q", shape.heads * shape.head_dim),
        ("k", shape.kv_heads * shape.head_dim),
        ("v", shape.kv_heads * shape.head_dim),
    )
    names: Names = []
    if input_norm:
        names.append((f"{ours}input_norm.weight", ((f"{theirs}input_layernorm.weight", (shape.hidden,)),)))
    attention = f"{theirs}self_attn."
    names.append(
        (f"{ours}attention.qkv.weight", tuple((f"{attention}{n}_proj.weight", (rows, width)) for n, rows in projections))
    )
    if bias:
        names.append((f"{ours}attention.qkv.bias", tuple((f"{attention}{n}_proj.bias", (rows,)) for n, rows in projections)))
    if head_norms:
        names += [(f"{ours}attention.{n}_norm.weight", ((f"{attention}{n}_norm.weight", (shape.head_dim,)),)) for n in "qk"]
    names += [
        (f"{ours}attention.out.weight", ((f"{attention}o_proj.weight", (shape.hidden, shape.heads * shape.head_dim)),)),
        (f"{ours}post_norm.weight", ((f"{theirs}post_attention_layernorm.weight", (shape.hidden,)),)),
        (
            f"{ours}mlp.gate_up.weight",
            tuple((f"{theirs}mlp.{n}_proj.weight", (shape.intermediate, shape.hidden)) for n in ("gate", "up")),
        ),
        (f"{ours}mlp.down.weight", ((f"{theirs}mlp.down_proj.weight", (shape.hidden, shape.intermediate)),)),
    ]
    return names


def eagle3_names(
    shape: Shape, *, streams: int, layers: int, first: str, norm_before_fc: bool, fc_norm: bool, fc_bias: bool
) -> Names:
    """EAGLE-3 without embedding, LM head and vocabulary maps. `first`: midlayer. or layers.0."""
    width = streams * shape.target_hidden
    names: Names = [("fc.weight", (("fc.weight", (shape.hidden, width)),))]
    if fc_bias:
        names.append(("fc.bias", (("fc.bias", (shape.hidden,)),)))
    if norm_before_fc:
        names.append(("input_norm.weight", (("input_norm.weight", (width,)),)))
    if fc_norm:
        names += [(f"stream_norms.{i}.weight", ((f"fc_norm.{i}.weight", (shape.target_hidden,)),)) for i in range(streams)]
    names.append(("first.hidden_norm.weight", ((f"{first}hidden_norm.weight", (shape.hidden,)),)))
    names += block_names("first.", first, shape, inputs=2 * shape.hidden)
    for layer in range(1, layers):
        names += block_names(f"rest.{layer - 1}.", f"layers.{layer}.", shape)
    names.append(("norm.weight", (("norm.weight", (shape.hidden,)),)))
    return names


def eagle_names(shape: Shape, *, layers: int, fc_bias: bool) -> Names:
    """EAGLE-1/2: the first block has no input norm."""
    names: Names = [("fc.weight", (("fc.weight", (shape.hidden, 2 * shape.hidden)),))]
    if fc_bias:
        names.append(("fc.bias", (("fc.bias", (shape.hidden,)),)))
    for layer in range(layers):
        names += block_names(f"blocks.{layer}.", f"layers.{layer}.", shape, input_norm=layer > 0)
    return names


MIMO = {
    "embedding_norm": "token_layernorm",
    "hidden_norm": "hidden_layernorm",
    "project": "input_proj",
    "norm": "final_layernorm",
}
DEEPSEEK = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj", "norm": "shared_head.norm"}


def mtp_names(
    shape: Shape, *, modules: int, prefix: str, first: int, parts: dict[str, str], bias: bool, head_norms: bool
) -> Names:
    """Modules `prefix`{first}., ...; `parts` is `MIMO` or `DEEPSEEK`, how a family calls what stands around the block."""
    names: Names = []
    for module in range(modules):
        ours, theirs = f"modules_.{module}.", f"{prefix}{first + module}."
        names += [
            (f"{ours}{norm}.weight", ((f"{theirs}{parts[norm]}.weight", (shape.hidden,)),))
            for norm in parts
            if norm != "project"
        ]
        names.append((f"{ours}project.weight", ((f"{theirs}{parts['project']}.weight", (shape.hidden, 2 * shape.hidden)),)))
        names += block_names(f"{ours}block.", theirs, shape, bias=bias, head_norms=head_norms)
    return names


def read(file: HeadFile, names: Names) -> dict[str, Tensor]:
    """Our state dictionary out of a file in the published layout."""
    import torch

    return {ours: torch.cat([file.take(name, *shape) for name, shape in theirs]) for ours, theirs in names}


def write(state: dict[str, Tensor], names: Names) -> dict[str, Tensor]:
    """The published layout out of our state dictionary."""
    tensors: dict[str, Tensor] = {}
    for ours, theirs in names:
        parts = state[ours].split([shape[0] for _, shape in theirs])
        tensors |= {name: part.clone() for (name, _), part in zip(theirs, parts, strict=True)}
    return tensors
