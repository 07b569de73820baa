"""Quantized linears are close to what they replace, by as much as their bits allow."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import generate, request

from backends.reference.engine import Engine
from backends.reference.options import EngineOptions
from backends.reference.quantization import LINEARS, Dense, Int4, Int8, Linear
from backends.types import ConfigError

X = torch.randn(7, 128, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(96, 128, generator=torch.Generator().manual_seed(1))
BIAS = torch.randn(96, generator=torch.Generator().manual_seed(2))


def error(linear: Linear) -> float:
    """Relative to the size of the outputs."""
    expected = X @ WEIGHT.T + BIAS
    return float((linear(X) - expected).norm() / expected.norm())


@pytest.mark.parametrize(("name", "bound"), [("none", 1e-6), ("int8", 0.01), ("int4", 0.12)])
def test_error_is_what_the_bits_allow(name: str, bound: float) -> None:
    linear = LINEARS[name](WEIGHT, BIAS)
    assert error(linear) < bound
    assert linear(X).dtype == torch.float32


def test_representable_weights_come_back_exactly() -> None:
    """Weights on the grid: int8 from -127..127 with scale 1; int4 from -8..7 with scale 1 and zero 0."""
    x = torch.randint(-2, 3, (3, 64)).float()
    for linear, low, high in ((Int8, -127, 127), (Int4, -8, 7)):
        weight = torch.randint(low, high + 1, (32, 64), generator=torch.Generator().manual_seed(0)).float()
        weight[:, 0], weight[:, 1] = low, high
        torch.testing.assert_close(linear(weight)(x), (x @ weight.T).bfloat16().float(), rtol=0.01, atol=1.0)


def test_int4_refuses_shapes_it_cannot_group() -> None:
    with pytest.raises(ConfigError, match="groups of 64"):
        Int4(torch.randn(32, 100))


@pytest.mark.parametrize(("variant", "k"), [("off", 0), ("ngram", 3)])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantized_model_generates(quantization: str, variant: str, k: int, tiny_dir: Path) -> None:
    engine = Engine(EngineOptions(tiny_dir, quantization=quantization, variant=variant, k=k, max_num_seqs=4))
    made = generate(engine, [request([i, 7, 9] * 5, 8, ignore_eos=True) for i in range(4)])
    assert [len(ids) for ids in made] == [8] * 4


def test_bfloat16_runs(tiny_dir: Path) -> None:
    engine = Engine(EngineOptions(tiny_dir, dtype="bfloat16", variant="ngram", k=3, ngram_min=1, max_num_seqs=4))
    assert engine.model.dtype == torch.bfloat16
    made = generate(engine, [request([i, 7, 9] * 5, 8, ignore_eos=True) for i in range(4)])
    assert [len(ids) for ids in made] == [8] * 4


def test_dense_is_the_plain_linear() -> None:
    fields: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(Dense(WEIGHT, BIAS)(X), X @ WEIGHT.T + BIAS, **fields)
