"""Checkpoints that AutoAWQ and AutoGPTQ (or GPTQModel) have quantized to 4 bits run with the very weights they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_weights import Codes, awq, gptq, gptq_v2, random_codes
from safetensors.torch import load_file, save_file
from tiny_models import generate, request, save, shape
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config

from backends.reference import adapter
from backends.reference.config import Packing, read_config
from backends.reference.engine import Engine
from backends.reference.loader import load_model
from backends.reference.options import EngineOptions
from backends.reference.quality import teacher_forced
from backends.reference.quantization.checkpoint import read_int4
from backends.reference.quantization.int4 import Int4, dequantize_int4, pack_int4
from backends.types import ConfigError, ServingConfig, WorkloadFacts

LAYOUTS: dict[str, tuple[Callable[[Codes], dict[str, Tensor]], Packing, dict[str, Any]]] = {
    "awq": (awq, Packing("awq", 0, 0), {"quant_method": "awq", "version": "gemm", "zero_point": True}),
    "gptq": (gptq, Packing("gptq", 0, 1), {"quant_method": "gptq", "desc_act": False, "sym": False}),
    "gptq_v2": (gptq_v2, Packing("gptq", 0, 0), {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "sym": False}),
}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def read(layout: str, codes: Codes, **changes: Tensor) -> tuple[Tensor, Tensor]:
    """q and scale_zero of a layer that is written and read again."""
    write, packing, _ = LAYOUTS[layout]
    tensors = write(codes) | changes
    rows, columns = codes.q.shape

    def take(name: str, size: tuple[int, ...]) -> Tensor:
        tensor = tensors.pop(name.removeprefix("layer."))
        assert tuple(tensor.shape) == size
        return tensor

    packing = Packing(packing.method, codes.group, packing.zero_offset)
    found = read_int4(packing, take, "layer", rows, columns, ordered="g_idx" in tensors)
    assert not tensors
    return found


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_weight_is_the_one_that_was_packed(layout: str, group: int) -> None:
    codes = random_codes(48, 256, group, seed=0)
    q, scale_zero = read(layout, codes)
    torch.testing.assert_close(
        dequantize_int4(pack_int4(q, group), scale_zero, torch.float32), codes.dense(), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_multiplies_by_it(layout: str, group: int) -> None:
    """On a CPU scales and zeros are rounded to bf16: not at all where they have few bits, and by 2^-8 of either else."""
    unit = torch.eye(256)
    exact = random_codes(48, 256, group, seed=1, short_scales=True)
    torch.testing.assert_close(Int4(*read(layout, exact))(unit).T, exact.dense(), rtol=1e-6, atol=0)
    other = random_codes(48, 256, group, seed=2)
    step = torch.from_numpy(other.scale.astype("float32")).T.repeat_interleave(group, 1)
    error = (Int4(*read(layout, other))(unit).T - other.dense()).abs()
    assert (
        error <= 2**-8 * (2 * 8 * step + other.dense().abs()) * 1.01
    ).all()  # scale and zero of up to 8 steps, and the result


def test_zeros_of_v1_wrap_around() -> None:
    """A stored 15 stands for 0, as in AutoGPTQ's `(qzeros + 1) & 15`."""
    codes = random_codes(16, 64, 64, seed=0)
    stored = {"qzeros": torch.full((1, 2), -1, dtype=torch.int32)}  # sixteen times 15
    _, scale_zero = read("gptq", codes, **stored)
    scale, zero = scale_zero.unbind(-1)
    assert torch.equal(zero, 8 * scale)


def test_inputs_ordered_by_activation_are_refused() -> None:
    codes = random_codes(16, 128, 64, seed=0)
    with pytest.raises(ConfigError, match=r"layer: g_idx puts inputs into groups by activation \(desc_act\)"):
        read("gptq", codes, g_idx=torch.randperm(128).int() // 64)


def test_sizes_and_types_that_do_not_fit_are_refused() -> None:
    take: Any = None
    with pytest.raises(ConfigError, match="96 inputs do not fill groups of 64"):
        read_int4(Packing("awq", 64, 0), take, "layer", 16, 96, ordered=False)
    with pytest.raises(ConfigError, match="these are int64"):
        read("awq", random_codes(16, 64, 64, seed=0), qweight=torch.zeros(64, 2, dtype=torch.int64))


def packed_model(folder: Path, layout: str, group: int, *, qwen: bool = False, head: bool = False) -> PreTrainedModel:
    """A tiny model with its linear layers packed, and transformers' model of the same weights. `head`: the LM head as well."""
    write, _, settings = LAYOUTS[layout]
    kind = Qwen2Config if qwen else LlamaConfig
    model = save(
        kind(**shape(hidden_size=128, intermediate_size=256, num_hidden_layers=3, tie_word_embeddings=not head)), folder
    )
    tensors = load_file(folder / "model.safetensors")
    for seed, (name, module) in enumerate(model.named_modules()):
        if name.rpartition(".")[2] in LINEARS or (head and name == "lm_head"):
            codes = random_codes(*module.weight.shape, group, seed, short_scales=True)
            module.weight.data = codes.dense()
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{part}": tensor for part, tensor in write(codes).items()}
    save_file(tensors, folder / "model.safetensors")
    edit(folder, quantization_config={"bits": 4, "group_size": group, **settings})
    return model


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("layout", "group", "more"),
    [
        ("awq", 64, {}),
        ("awq", 128, {"qwen": True}),
        ("gptq", 128, {}),
        ("gptq", 64, {"qwen": True, "head": True}),
        ("gptq_v2", 64, {}),
    ],
)
def test_a_packed_model_is_the_model_of_its_dequantized_weights(
    layout: str, group: int, more: dict[str, bool], tmp_path: Path
) -> None:
    model = packed_model(tmp_path, layout, group, **more)
    loaded = load_model(tmp_path)
    for layer, original in zip(loaded._layers, model.model.layers, strict=True):
        attention, mlp = original.self_attn, original.mlp
        for ours, parts in (
            (layer.qkv, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.out, (attention.o_proj,)),
            (layer.gate_up, (mlp.gate_proj, mlp.up_proj)),
            (layer.down, (mlp.down_proj,)),
        ):
            expected = torch.cat([part.weight for part in parts]).detach()
            zeros = ours(torch.zeros(1, expected.shape[1]))  # the bias, where there is one
            torch.testing.assert_close((ours(torch.eye(expected.shape[1])) - zeros).T, expected, rtol=1e-6, atol=1e-6)
            if parts[0].bias is not None:
                torch.testing.assert_close(zeros[0], torch.cat([part.bias for part in parts]).detach())
    ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    got = teacher_forced(loaded, ids, 1, "auto")
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0, :-1]
    assert (got - wanted).norm() / wanted.norm() < 0.02  # activations are bf16 inside of int4 layers


def test_a_packed_model_generates_and_says_what_it_runs(tmp_path: Path) -> None:
    packed_model(tmp_path, "gptq", 64)
    engine = Engine(EngineOptions(tmp_path, variant="ngram", k=3, max_num_seqs=4, ngram_min=1))
    made = generate(engine, [request([i, 7, 9] * 5, 8, ignore_eos=True) for i in range(4)])
    assert [len(ids) for ids in made] == [8] * 4
    assert "gptq checkpoint: its 4-bit weights, in groups of 64, run as int4" in str(engine.resolved()["weight_notes"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"quant_method": "compressed-tensors"},
            r"quantized by compressed-tensors; the engine reads awq \(gemm\), gptq \(gptq\)",
        ),
        ({"version": "gemv"}, "quantized by awq in the layout gemv"),
        ({"quant_method": "gptq", "version": None, "checkpoint_format": "marlin"}, "by gptq in the layout marlin"),
        ({"bits": 8}, "quantized to 8 bits by awq; the engine reads 4"),
        ({"group_size": 32}, "in groups of 32 by awq; the engine reads groups of 64 and 128"),
        ({"group_size": -1}, "in groups of -1 by awq"),
    ],
)
def test_another_quantization_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    packed_model(tmp_path, "awq", 64)
    edit(tmp_path, quantization_config={"bits": 4, "group_size": 64, **LAYOUTS["awq"][2], **changes})
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


def test_packed_weights_are_not_quantized_again(tmp_path: Path) -> None:
    packed_model(tmp_path, "awq", 64)
    with pytest.raises(
        ConfigError, match=r"holds 4-bit weights \(awq\): they run as they are, with quantization none, not int8"
    ):
        load_model(tmp_path, quantization="int8")
    with pytest.raises(ConfigError, match=r"self-int4 drafts with an int4 copy, and .* holds 4-bit weights itself"):
        Engine(EngineOptions(tmp_path, variant="draft_model", k=2, draft="self-int4"))
    asked = ServingConfig(backend="reference", model=str(tmp_path), weight_quantization="int8")
    assert "with quantization none, not int8" in str(adapter.supports(asked, WorkloadFacts()))
