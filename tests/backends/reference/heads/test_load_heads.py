"""Heads in every published layout compute what a straight derivation from their tensors does, and say what was converted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from backends.reference.heads.block import causal
from backends.reference.heads.files import TargetWeights, read_target
from backends.reference.heads.load import LoadedHead, aux_layers, load_head
from backends.types import ConfigError
from tests.backends.reference.heads import published as p
from tests.backends.reference.tiny_models import VOCAB

N = 7
POSITIONS = torch.arange(N)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetWeights:
    return read_target(p.target(tmp_path_factory.mktemp("target")), torch.float32)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def one(x: Tensor) -> Tensor:
    return x[None]


def eagle3_tensors(prefix: str, *, more: p.Tensors | None = None) -> tuple[p.Tensors, Tensor]:
    d2t, ids = p.draft_map()
    tensors = p.block(prefix, 2 * p.H) | {
        "fc.weight": p.rand(p.H, 3 * p.H),
        f"{prefix}hidden_norm.weight": p.norm_weight(),
        "norm.weight": p.norm_weight(),
        "lm_head.weight": p.rand(p.DRAFT_VOCAB, p.H),
        "d2t": d2t,
        "t2d": p.flags(ids),
    }
    return tensors | (more or {}), ids


@torch.no_grad()
def check_eagle3(
    loaded: LoadedHead, t: p.Tensors, ids: Tensor, prefix: str, embedding: Tensor, *, normed_residual: bool
) -> None:
    """Two steps: over true rows, then once more over the same rows with the first output fed back."""
    head = loaded.head
    tokens, streams = torch.randint(VOCAB, (N,)), torch.randn(3, N, p.H)
    parts = list(streams)
    if "fc_norm.0.weight" in t:
        parts = [p.rms(stream, t[f"fc_norm.{i}.weight"]) for i, stream in enumerate(parts)]
    fused = torch.cat(parts, -1)
    if "input_norm.weight" in t:
        fused = p.rms(fused, t["input_norm.weight"])
    g = fused @ t["fc.weight"].T
    e = embedding[tokens]
    y = p.eagle3_block(e, g, t, prefix, POSITIONS, normed_residual=normed_residual)
    ours = head(one(head.embed(tokens)), one(head.fuse(list(streams))), one(POSITIONS), causal())[0]
    close(ours, y)
    close(head.logits(ours), p.rms(y, t["norm.weight"]) @ t["lm_head.weight"].T)
    again = p.eagle3_block(e, head.recycle(y), t, prefix, POSITIONS, normed_residual=normed_residual)
    close(head(one(e), one(head.recycle(ours)), one(POSITIONS), causal())[0], again)
    assert torch.equal(head.target_ids(torch.arange(p.DRAFT_VOCAB)), ids)


def test_official_eagle3_has_a_midlayer_and_the_raw_hidden_as_residual(tmp_path: Path, target: TargetWeights) -> None:
    tensors, ids = eagle3_tensors("midlayer.")
    p.write(tmp_path, tensors, p.config(draft_vocab_size=p.DRAFT_VOCAB, architectures=["LlamaForCausalLMEagle3"]))
    loaded = load_head(tmp_path, target, "eagle3")
    check_eagle3(loaded, tensors, ids, "midlayer.", target.embedding, normed_residual=False)
    assert loaded.aux_layers == (2, 4, 5)
    assert any("shared with the target" in note for note in loaded.notes)


def test_speculators_eagle3_nests_its_layer_and_norms_the_residual(tmp_path: Path, target: TargetWeights) -> None:
    own = p.rand(VOCAB, p.H)
    tensors, ids = eagle3_tensors("layers.0.", more={"embed_tokens.weight": own})
    raw = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": p.DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        "transformer_layer_config": p.config(num_hidden_layers=1),
    }
    p.write(tmp_path, tensors, raw)
    loaded = load_head(tmp_path, target, "eagle3")
    check_eagle3(loaded, tensors, ids, "layers.0.", own, normed_residual=True)
    assert loaded.aux_layers == (1, 3, 6)


@pytest.mark.parametrize("name", ["input_norm.weight", "fc_norm.0.weight"])
def test_norms_before_fc_are_found_by_their_tensors(tmp_path: Path, target: TargetWeights, name: str) -> None:
    names = ["input_norm.weight"] if name == "input_norm.weight" else [f"fc_norm.{i}.weight" for i in range(3)]
    more = {n: p.norm_weight(3 * p.H // len(names)) for n in names}
    tensors, ids = eagle3_tensors("midlayer.", more=more)
    p.write(tmp_path, tensors, p.config(draft_vocab_size=p.DRAFT_VOCAB))
    loaded = load_head(tmp_path, target, "eagle3")
    check_eagle3(loaded, tensors, ids, "midlayer.", target.embedding, normed_residual=False)


def test_norm_output_feeds_the_normed_output_back(tmp_path: Path, target: TargetWeights) -> None:
    tensors, _ = eagle3_tensors("midlayer.")
    p.write(tmp_path, tensors, p.config(draft_vocab_size=p.DRAFT_VOCAB, norm_output=True))
    head = load_head(tmp_path, target, "eagle3").head
    y = torch.randn(N, p.H)
    close(head.recycle(y), p.rms(y, tensors["norm.weight"]))


def test_sglang_layer_ids_are_moved_by_one_block(tmp_path: Path, target: TargetWeights) -> None:
    tensors, _ = eagle3_tensors("midlayer.")
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}
    p.write(tmp_path, tensors, p.config(draft_vocab_size=p.DRAFT_VOCAB, eagle_config=nested))
    loaded = load_head(tmp_path, target, "eagle3")
    assert loaded.aux_layers == (2, 4, 5)
    assert any("block outputs" in note for note in loaded.notes)
    assert load_head(tmp_path, target, "eagle3", aux_ids_are_outputs=False).aux_layers == (1, 3, 4)


def test_ids_in_the_place_of_offsets_are_recognised(tmp_path: Path, target: TargetWeights) -> None:
    tensors, ids = eagle3_tensors("midlayer.")
    p.write(tmp_path, tensors | {"d2t": ids}, p.config(draft_vocab_size=p.DRAFT_VOCAB))
    loaded = load_head(tmp_path, target, "eagle3")
    assert torch.equal(loaded.head.target_ids(torch.arange(p.DRAFT_VOCAB)), ids)
    assert any("not offsets" in note for note in loaded.notes)


def test_a_map_that_contradicts_its_flags_is_refused(tmp_path: Path, target: TargetWeights) -> None:
    tensors, ids = eagle3_tensors("midlayer.")
    p.write(tmp_path, tensors | {"t2d": p.flags(ids.roll(1)[:-1])}, p.config(draft_vocab_size=p.DRAFT_VOCAB))
    with pytest.raises(ConfigError, match="agree with t2d"):
        load_head(tmp_path, target, "eagle3")


@torch.no_grad()
def test_p_eagle_drafts_all_tokens_in_one_causal_pass(tmp_path: Path, target: TargetWeights) -> None:
    """Two blocks, mask rows after the true ones: equal to plain causal attention over the whole."""
    own, mask = p.rand(VOCAB, p.H), 270
    more = p.block("layers.1.") | {"mask_hidden": torch.randn(1, 1, 3 * p.H), "embed_tokens.weight": own}
    t, ids = eagle3_tensors("layers.0.", more=more)
    layer = p.config(num_hidden_layers=2)
    raw = {
        "speculators_model_type": "peagle",
        "draft_vocab_size": p.DRAFT_VOCAB,
        "mask_token_id": mask,
        "transformer_layer_config": layer,
    }
    p.write(tmp_path, t, raw)
    head = load_head(tmp_path, target, "p_eagle").head
    tokens, streams, count = torch.randint(VOCAB, (N - 3,)), torch.randn(3, N - 3, p.H), 3
    e = torch.cat((own[tokens], own[mask].expand(count, -1)))
    g = torch.cat((torch.cat(list(streams), -1), t["mask_hidden"].view(1, -1).expand(count, -1))) @ t["fc.weight"].T
    y = p.plain_block(p.eagle3_block(e, g, t, "layers.0.", POSITIONS, normed_residual=True), t, "layers.1.", POSITIONS)
    mask_e, mask_g = head.mask_rows(count)
    rows = torch.cat((head.embed(tokens), mask_e)), torch.cat((head.fuse(list(streams)), mask_g))
    ours = head(one(rows[0]), one(rows[1]), one(POSITIONS), causal())[0]
    close(head.logits(ours), p.rms(y, t["norm.weight"]) @ t["lm_head.weight"].T)
    assert torch.equal(head.target_ids(torch.arange(p.DRAFT_VOCAB)), ids)


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_eagle_attends_from_fc_without_an_input_norm(tmp_path: Path, target: TargetWeights, bias: bool, file: str) -> None:
    t = p.block("layers.0.", input_norm=False) | {"fc.weight": p.rand(p.H, 2 * p.H), "embed_tokens.weight": p.rand(VOCAB, p.H)}
    if bias:
        t["fc.bias"] = torch.randn(p.H)
    p.write(tmp_path, t, p.config(num_hidden_layers=1, bias=bias), file)
    loaded = load_head(tmp_path, target, "eagle2")
    tokens, hidden = torch.randint(VOCAB, (N,)), torch.randn(N, p.H)
    x = torch.cat((t["embed_tokens.weight"][tokens], hidden), -1) @ t["fc.weight"].T + t.get("fc.bias", torch.zeros(()))
    y = p.plain_block(x, t, "layers.0.", POSITIONS)
    ours = loaded.head(one(loaded.head.embed(tokens)), one(hidden), one(POSITIONS), causal())[0]
    close(ours, y)
    close(loaded.head.logits(ours), y @ target.output.T)
    assert any("pickled" in note for note in loaded.notes) == file.endswith(".bin")


@torch.no_grad()
@pytest.mark.parametrize("layout", ["fasterdecoding", "prefixed", "vllm"])
def test_medusa_adds_a_silu_residual_before_each_lm_head(tmp_path: Path, target: TargetWeights, layout: str) -> None:
    heads, t, blocks, outputs = 3, {}, [], []
    for h in range(heads):
        weight, bias, output = p.rand(p.H, p.H), torch.randn(p.H), p.rand(VOCAB, p.H)
        blocks.append((weight, bias))
        outputs.append(output)
        start = {"fasterdecoding": f"{h}.0.linear", "prefixed": f"medusa_head.{h}.0.linear", "vllm": f"blocks.{h}.layers.0"}[
            layout
        ]
        end = {"fasterdecoding": f"{h}.1.weight", "prefixed": f"medusa_head.{h}.1.weight", "vllm": f"lm_heads.{h}.weight"}[
            layout
        ]
        t |= {f"{start}.weight": weight, f"{start}.bias": bias, end: output}
    raw = {"medusa_num_heads": 5, "medusa_num_layers": 1} if layout != "vllm" else {"num_heads": 3, "num_hidden_layers": 1}
    p.write(tmp_path, t, raw, "medusa_lm_head.pt" if layout == "fasterdecoding" else "model.safetensors")
    loaded = load_head(tmp_path, target, "medusa")
    hidden = torch.randn(N, p.H)
    logits = loaded.head.logits(loaded.head(hidden))
    for h, ((weight, bias), output) in enumerate(zip(blocks, outputs, strict=True)):
        close(logits[h], (hidden + torch.nn.functional.silu(hidden @ weight.T + bias)) @ output.T)
    assert any("says 5 heads" in note for note in loaded.notes) == (layout != "vllm")


def mtp_reference(t: p.Tensors, prefix: str, names: tuple[str, str, str, str], order: str, e: Tensor, h: Tensor) -> Tensor:
    token, hidden, project, final = (f"{prefix}{name}.weight" for name in names)
    parts = {"e": p.rms(e, t[token]), "h": p.rms(h, t[hidden])}
    x = torch.cat([parts[part] for part in order], -1) @ t[project].T
    return p.rms(p.plain_block(x, t, prefix, POSITIONS), t[final])


MTP_NAMES = {
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "speculators": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
}


@torch.no_grad()
@pytest.mark.parametrize(("layout", "prefix", "order", "zeroed"), [
    ("mimo", "model.mtp_layers.0.", "he", True),
    ("deepseek", "model.layers.8.", "eh", True),
    ("speculators", "mtp_layers.0.", "eh", False),
])  # fmt: skip
def test_mtp_concatenates_in_its_familys_order(
    tmp_path: Path, target: TargetWeights, layout: str, prefix: str, order: str, zeroed: bool
) -> None:
    names = MTP_NAMES[layout]
    t = p.block(prefix, bias=layout == "mimo") | {f"{prefix}{name}.weight": p.norm_weight() for name in names}
    t[f"{prefix}{names[2]}.weight"] = p.rand(p.H, 2 * p.H)
    extra = {"model.norm.weight": p.norm_weight(), "model.layers.0.input_layernorm.weight": p.norm_weight()}  # the target's own
    if layout == "deepseek":
        extra |= {
            f"{prefix}embed_tokens.weight": target.embedding.clone(),
            f"{prefix}shared_head.head.weight": target.output.clone(),
        }
    layer = p.config(num_hidden_layers=8, num_nextn_predict_layers=1)
    p.write(
        tmp_path,
        t | extra,
        {"speculators_model_type": "mtp", "transformer_layer_config": layer} if layout == "speculators" else layer,
    )
    loaded = load_head(tmp_path, target, "mtp")
    tokens, hidden = torch.randint(VOCAB, (N,)), torch.randn(N, p.H)
    e = loaded.head.embed(tokens)
    if zeroed:
        e = e.clone()
        e[0] = 0
    y = mtp_reference(t, prefix, names, order, e, hidden)
    ours = loaded.head(one(loaded.head.embed(tokens)), one(hidden), one(POSITIONS), causal())[0]
    close(ours, y)
    close(loaded.head.logits(ours), y @ target.output.T)
    assert any("MTP projection" in note for note in loaded.notes)


def test_an_unknown_tensor_is_an_error_that_names_it(tmp_path: Path, target: TargetWeights) -> None:
    tensors, _ = eagle3_tensors("midlayer.", more={"midlayer.self_attn.sinks": torch.zeros(4)})
    p.write(tmp_path, tensors, p.config(draft_vocab_size=p.DRAFT_VOCAB))
    with pytest.raises(ConfigError, match=r"midlayer\.self_attn\.sinks \[4\]"):
        load_head(tmp_path, target, "eagle3")


def test_a_wrong_shape_is_an_error_with_both_shapes(tmp_path: Path, target: TargetWeights) -> None:
    tensors, _ = eagle3_tensors("midlayer.", more={"midlayer.mlp.down_proj.weight": p.rand(p.H, 90)})
    p.write(tmp_path, tensors, p.config(draft_vocab_size=p.DRAFT_VOCAB))
    with pytest.raises(ConfigError, match=r"down_proj\.weight has shape \[64, 90\], expected \[64, 96\]"):
        load_head(tmp_path, target, "eagle3")


def test_a_pickle_with_code_in_it_is_refused(tmp_path: Path, target: TargetWeights) -> None:
    class Code:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return print, ("ran",)

    tmp_path.joinpath("config.json").write_text("{}")
    torch.save({"fc.weight": Code()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="cannot be read as plain tensors"):
        load_head(tmp_path, target, "eagle3")


@torch.no_grad()
def test_rows_whose_output_is_not_needed_give_the_same_keys(tmp_path: Path, target: TargetWeights) -> None:
    tensors, _ = eagle3_tensors("midlayer.")
    p.write(tmp_path, tensors, p.config(draft_vocab_size=p.DRAFT_VOCAB))
    head = load_head(tmp_path, target, "eagle3").head
    e, g = torch.randn(1, N, p.H), torch.randn(1, N, p.H)
    seen: list[tuple[Tensor, Tensor]] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((k, v))
        return causal()(layer, q, k, v)

    head(e, g, one(POSITIONS), attend)
    k, v = head.keys_values(e, g, one(POSITIONS))
    close(k, seen[0][0])
    close(v, seen[0][1])


def test_a_target_too_shallow_for_three_different_streams_is_refused() -> None:
    notes: list[str] = []
    assert aux_layers({}, 8, notes) == (2, 4, 5)
    with pytest.raises(ConfigError, match=r"\[2, 2, 2\] do not fit a target of 5 blocks"):
        aux_layers({}, 5, notes)
    assert not notes
