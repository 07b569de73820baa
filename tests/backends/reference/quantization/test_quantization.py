"""Quantized linears are close to what they replace, by as much as their bits allow."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import generate, request

from backends.reference.engine import Engine
from backends.reference.options import QUANTIZATIONS, EngineOptions
from backends.reference.quantization import HEADS, LINEARS
from backends.reference.quantization.dense import Dense, Linear
from backends.reference.quantization.int4 import Int4
from backends.types import ConfigError

X = torch.randn(7, 128, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(96, 128, generator=torch.Generator().manual_seed(1))
BIAS = torch.randn(96, generator=torch.Generator().manual_seed(2))


def error(linear: Linear) -> float:
    """Relative to the size of the outputs."""
    expected = X @ WEIGHT.T + BIAS
    return float((linear(X) - expected).norm() / expected.norm())


@pytest.mark.parametrize(("name", "bound"), [("none", 1e-6), ("int8", 0.015), ("int4", 0.12), ("fp8", 0.06)])
def test_error_is_what_the_bits_allow(name: str, bound: float) -> None:
    linear = LINEARS[name](WEIGHT, BIAS)
    assert error(linear) < bound
    assert linear(X).dtype == torch.float32


def test_int4_weights_on_the_grid_come_back_exactly() -> None:
    """Whole numbers of -8..7 with both ends in every group: scale 1 and zero 0."""
    x = torch.randint(-2, 3, (3, 64)).float()
    weight = torch.randint(-8, 8, (32, 64), generator=torch.Generator().manual_seed(0)).float()
    weight[:, 0], weight[:, 1] = -8, 7
    torch.testing.assert_close(Int4.quantize(weight)(x), (x @ weight.T).bfloat16().float())


def test_int4_refuses_shapes_it_cannot_group() -> None:
    with pytest.raises(ConfigError, match="groups of 64"):
        Int4.quantize(torch.randn(32, 100))
    with pytest.raises(ConfigError, match="multiples of 16"):
        Int4.quantize(torch.randn(24, 64))


def test_every_quantization_is_in_every_table() -> None:
    assert tuple(LINEARS) == tuple(HEADS) == QUANTIZATIONS


@pytest.mark.parametrize(("variant", "k"), [("off", 0), ("ngram", 3)])
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_a_quantized_model_generates(quantization: str, variant: str, k: int, tiny_dir: Path) -> None:
    engine = Engine(EngineOptions(tiny_dir, quantization=quantization, variant=variant, k=k, max_num_seqs=4))
    made = generate(engine, [request([i, 7, 9] * 5, 8, ignore_eos=True) for i in range(4)])
    assert [len(ids) for ids in made] == [8] * 4


def test_emulated_fp8_is_marked(tiny_dir: Path) -> None:
    engine = Engine(EngineOptions(tiny_dir, quantization="fp8"))
    assert "fp8 is emulated" in str(engine.resolved()["weight_notes"])
    drafting = Engine(EngineOptions(tiny_dir, variant="draft_model", k=2, draft=str(tiny_dir), draft_quantization="fp8"))
    assert drafting.resolved()["weight_notes"] == ""
    assert "fp8 is emulated" in str(drafting.resolved()["draft_notes"])


def test_bfloat16_runs(tiny_dir: Path) -> None:
    engine = Engine(EngineOptions(tiny_dir, dtype="bfloat16", variant="ngram", k=3, ngram_min=1, max_num_seqs=4))
    assert engine.model.dtype == torch.bfloat16
    made = generate(engine, [request([i, 7, 9] * 5, 8, ignore_eos=True) for i in range(4)])
    assert [len(ids) for ids in made] == [8] * 4


def test_dense_is_the_plain_linear() -> None:
    fields: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(Dense(WEIGHT, BIAS)(X), X @ WEIGHT.T + BIAS, **fields)
