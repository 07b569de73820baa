"""Draft heads for the tiny target, random at first and then trained for some seconds on the texts that the tests decode.

A random head is hardly ever right. One that has learnt these very texts is right often enough, and wrong often enough, to take
every path through the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from backends.reference.heads import layouts
from backends.reference.heads.block import causal
from backends.reference.heads.files import read_target
from backends.reference.heads.load import LoadedHead, load_head
from tests.backends.reference.heads import published as p

DEPTH = 3
"""Draft tokens that a head is trained for."""
STEPS = 40
MEDUSA_HEADS = 6


def random_head(folder: Path, variant: str, ids: Tensor) -> Path:
    """A checkpoint of a random head; `ids`, ascending, is the draft vocabulary where the variant has one."""
    torch.manual_seed(5)
    if variant == "medusa":
        tensors = {f"{h}.1.weight": p.rand(p.VOCAB, p.H) for h in range(MEDUSA_HEADS)}
        for h in range(MEDUSA_HEADS):
            tensors |= {f"{h}.0.linear.weight": p.rand(p.H, p.H), f"{h}.0.linear.bias": torch.randn(p.H)}
        return p.write(folder, tensors, {})
    if variant == "eagle2":
        tensors = p.block("layers.0.", input_norm=False) | {"fc.weight": p.rand(p.H, 2 * p.H), "fc.bias": torch.randn(p.H)}
        return p.write(folder, tensors, p.config())
    if variant == "mtp":
        tensors = p.block("mtp_layers.0.") | {"mtp_layers.0.input_proj.weight": p.rand(p.H, 2 * p.H)}
        tensors |= {f"mtp_layers.0.{name}_layernorm.weight": p.norm_weight() for name in ("token", "hidden", "final")}
        return p.write(folder, tensors, {"speculators_model_type": "mtp", "transformer_layer_config": p.config()})
    first = "midlayer." if variant == "eagle3" else "layers.0."
    tensors = p.block(first, 2 * p.H) | {
        "fc.weight": p.rand(p.H, 3 * p.H),
        f"{first}hidden_norm.weight": p.norm_weight(),
        "norm.weight": p.norm_weight(),
        "lm_head.weight": p.rand(len(ids), p.H),
        "d2t": ids - torch.arange(len(ids)),
    }
    raw = p.config(draft_vocab_size=len(ids))
    if variant == "p_eagle":
        tensors |= p.block("layers.1.") | {"mask_hidden": torch.randn(1, 1, 3 * p.H)}
        raw |= {"mask_token_id": p.VOCAB - 1}
    return p.write(folder, tensors, raw)


def trained_head(folder: Path, variant: str, target: Path, model: PreTrainedModel, texts: list[list[int]]) -> Path:
    """The same after a few steps of learning the target's distributions on `texts`."""
    ids = torch.tensor([t for text in texts for t in text]).bincount(minlength=p.VOCAB).topk(120).indices.sort().values
    loaded = load_head(random_head(folder, variant, ids), read_target(target, torch.float32), variant)
    head = loaded.head.train()
    if variant == "p_eagle":  # three rows for every one of the others: half the texts do
        texts = texts[::2]
    tokens = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) for text in texts])
    with torch.no_grad():
        out = model(tokens, output_hidden_states=True)
    wanted = out.logits if head.token_map is None else out.logits[..., head.token_map]
    streams = [out.hidden_states[i] for i in loaded.aux_layers] or [out.hidden_states[-1]]
    optimizer = torch.optim.AdamW(head.parameters(), lr=4e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for ahead, logits in enumerate(_drafts(variant, loaded, tokens, lengths, streams)):
            # row t, `ahead` steps on, drafts token t + 2 + ahead, for which the target's logits are those after t + 1 + ahead
            shift = 1 + ahead
            known = torch.arange(tokens.shape[1] - shift) < (lengths - shift)[:, None]
            teacher = wanted[:, shift:].softmax(-1)
            loss = loss + F.cross_entropy(logits[:, : tokens.shape[1] - shift][known], teacher[known])
        loss.backward()
        optimizer.step()
    return _save(folder, variant, loaded)


def _drafts(variant: str, loaded: LoadedHead, tokens: Tensor, lengths: Tensor, streams: list[Tensor]) -> Iterator[Tensor]:
    """Logits [texts, rows, draft vocabulary] of the first, second, ... draft token from each row."""
    head = loaded.head
    if variant == "medusa":
        yield from head.logits(head(streams[0])[:DEPTH])
        return
    following = F.pad(tokens[:, 1:], (0, 1))
    positions = torch.arange(tokens.shape[1])
    if variant == "p_eagle":
        yield from _parallel(head, following, streams)
        return
    hidden = head.fuse(streams)
    for ahead in range(DEPTH):
        shifted = F.pad(following[:, ahead:], (0, ahead))
        output = head(head.embed(shifted), hidden, positions, causal())
        yield head.logits(output)
        hidden = head.recycle(output)


def _parallel(head: torch.nn.Module, following: Tensor, streams: list[Tensor]) -> Iterator[Tensor]:
    """All rows of all depths in one pass: a mask row sees the true rows up to its anchor and the mask rows before it there."""
    n = following.shape[1]
    depth, anchor = torch.arange(DEPTH).repeat_interleave(n), torch.arange(n).repeat(DEPTH)
    true = (depth == 0) & (anchor <= anchor[:, None])
    mask = true | ((anchor == anchor[:, None]) & (depth <= depth[:, None]))
    blank_e, blank_g = head.mask_rows((DEPTH - 1) * n)
    batch = len(following)
    embedded = torch.cat((head.embed(following), blank_e.expand(batch, -1, -1)), 1)
    hidden = torch.cat((head.fuse(streams), blank_g.expand(batch, -1, -1)), 1)
    output = head(embedded, hidden, anchor + depth, causal(mask[None, None]))
    yield from head.logits(output).split(n, 1)


def _save(folder: Path, variant: str, loaded: LoadedHead) -> Path:
    head = loaded.head.eval()
    path = folder / "model.safetensors"
    state = {name: tensor.detach() for name, tensor in head.state_dict().items()}
    tensors = load_file(path)
    if variant == "medusa":
        for h in range(MEDUSA_HEADS):
            tensors |= {f"{h}.0.linear.{kind}": state[f"blocks.{h}.0.{kind}"] for kind in ("weight", "bias")}
            tensors[f"{h}.1.weight"] = state[f"heads.{h}.weight"]
    elif variant == "eagle2":
        tensors |= layouts.write(state, layouts.eagle_names(head.shape, layers=1, fc_bias=True))
    elif variant == "mtp":
        parts = layouts.MIMO
        tensors |= layouts.write(
            state,
            layouts.mtp_names(head.shape, modules=1, prefix="mtp_layers.", first=0, parts=parts, bias=False, head_norms=False),
        )
    else:
        if variant == "p_eagle":
            tensors |= {name: state[name] for name in ("mask_hidden", "mask_embedding")}
            state = {name.removeprefix("body."): tensor for name, tensor in state.items()}
        layers = 1 if variant == "eagle3" else 2
        first = "midlayer." if variant == "eagle3" else "layers.0."
        names = layouts.eagle3_names(
            head.shape, streams=3, layers=layers, first=first, norm_before_fc=False, fc_norm=False, fc_bias=False
        )
        tensors |= layouts.write(state, names) | {"lm_head.weight": state["head.weight"]}
    return p.write(folder, tensors, json.loads((folder / "config.json").read_text()))
