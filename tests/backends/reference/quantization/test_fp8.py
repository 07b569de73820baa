"""fp8 is emulated: the numbers are those of e4m3, and the product is that of these numbers."""

import pytest
import torch
from torch import Tensor

from backends.reference.quantization.fp8 import EmulatedFp8, Fp8, fp8, to_e4m3

ROWS = torch.randn(7, 192, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 7)[:, None]
WEIGHT = torch.randn(112, 192, generator=torch.Generator().manual_seed(1))
BIAS = torch.randn(112, generator=torch.Generator().manual_seed(2))


def e4m3_numbers() -> Tensor:
    """All finite ones by their definition: 4 bits of exponent with bias 7, 3 of mantissa; the highest code is NaN. [253]"""
    positive = [m / 8 * 2**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
    return torch.tensor(sorted({sign * number for number in positive for sign in (-1, 1)}), dtype=torch.float64)


def test_rows_are_rounded_to_the_nearest_e4m3_number() -> None:
    numbers = e4m3_numbers()
    assert (len(numbers), numbers.max()) == (253, 448)
    q, scale = to_e4m3(ROWS)
    assert q.dtype == torch.float8_e4m3fn
    assert (q.double().abs().amax(1) == 448).all()
    wanted = (ROWS / scale).double()
    nearest = (wanted[..., None] - numbers).abs().amin(-1)
    assert torch.equal((wanted - q.double()).abs(), nearest)
    assert torch.isin(q.double(), numbers).all()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-7)], ids=str
)
def test_the_product_is_that_of_the_rounded_values(dtype: torch.dtype, tolerance: float) -> None:
    x, weight = ROWS.to(dtype), WEIGHT.to(dtype)
    (q_x, scale_x), (q_w, scale_w) = to_e4m3(x), to_e4m3(weight)
    expected = (q_x.double() * scale_x.double()) @ (q_w.double() * scale_w.double()).T
    got = EmulatedFp8(weight)(x)
    assert got.dtype == dtype
    error = (got.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert (error < tolerance).all()


def test_three_bits_of_mantissa_bound_the_error() -> None:
    """An e4m3 number is off by a 16th at most, so by 1/8 + 1/256 of |x| |w| for each input (numbers below the normal ones aside)."""
    exact = ROWS.double() @ WEIGHT.double().T
    error = (EmulatedFp8(WEIGHT)(ROWS).double() - exact).abs()
    assert (error <= (ROWS.abs().double() @ WEIGHT.abs().double().T) * (1 / 8 + 1 / 256)).all()
    assert (error.norm(dim=1) / exact.norm(dim=1) < 0.06).all()


def test_a_row_of_zeros_gives_the_bias() -> None:
    assert torch.equal(EmulatedFp8(WEIGHT, BIAS)(torch.zeros(2, 192)), BIAS.expand(2, -1))


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="torch's CPU product of e4m3 with a scale a row needs AMX")
def test_the_product_for_gpus_gives_the_same() -> None:
    """The very call that a GPU gets, since torch has it for some CPUs too."""
    x, weight, bias = (part.bfloat16() for part in (ROWS, WEIGHT, BIAS))
    got, expected = Fp8(weight, bias)(x).double(), EmulatedFp8(weight, bias)(x).double()
    assert ((got - expected).norm(dim=1) / expected.norm(dim=1) < 2**-7).all()


def test_a_cpu_emulates() -> None:
    assert isinstance(fp8(WEIGHT.bfloat16()), EmulatedFp8)
