"""int8 times int8: what a row gives depends on that row alone, and errs by no more than rounding both sides explains."""

import pytest
import torch

from backends.reference.quantization.int8 import Int8, to_int8

ROWS = torch.randn(64, 192, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 64)[:, None]  # of every size
WEIGHT = torch.randn(112, 192, generator=torch.Generator().manual_seed(1))
BIAS = torch.randn(112, generator=torch.Generator().manual_seed(2))


@pytest.fixture(params=["oneDNN", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The two ways to multiply; the plain one is what a GPU runs."""
    if request.param == "plain":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_gives_the_same_bits_whatever_lies_beside_it(dtype: torch.dtype) -> None:
    linear, x = Int8(WEIGHT.to(dtype), BIAS.to(dtype)), ROWS.to(dtype)
    alone = torch.cat([linear(row[None]) for row in x])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    for n in (2, 5, 8, 31, 64):
        some = order[:n]
        assert torch.equal(linear(x[some]), alone[some])


def test_whole_numbers_come_back_exactly(way: str) -> None:
    """With 127 the largest of every row and channel all scales are 1."""
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-127, 128, size, generator=random).float() for size in ((5, 64), (32, 64)))
    x[:, 3], weight[:, 5] = -127, 127
    assert torch.equal(Int8(weight)(x), x @ weight.T)


def test_rounding_both_sides_bounds_the_error(way: str) -> None:
    """Either side errs by half a step at most, so a sum by |x| step_w / 2 + |w| step_x / 2 + step_x step_w / 4 for each input."""
    exact = ROWS.double() @ WEIGHT.double().T
    step_x, step_w = (rows.abs().amax(1, keepdim=True) / 127 for rows in (ROWS, WEIGHT))
    bound = ROWS.abs().sum(1, keepdim=True) * step_w.T / 2 + step_x * WEIGHT.abs().sum(1) / 2 + 192 * step_x * step_w.T / 4
    error = (Int8(WEIGHT)(ROWS).double() - exact).abs()
    assert (error <= bound * 1.001).all()
    assert (error.norm(dim=1) / exact.norm(dim=1) < 0.02).all()  # far below that bound, for rows of every size


def test_a_row_of_zeros_gives_the_bias(way: str) -> None:
    assert torch.equal(Int8(WEIGHT, BIAS)(torch.zeros(2, 192)), BIAS.expand(2, -1))


def test_the_plain_product_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Int8(WEIGHT, BIAS)(ROWS)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    error = (Int8(WEIGHT, BIAS)(ROWS) - expected).norm(dim=1) / expected.norm(dim=1)
    assert (error < 1e-6).all()


def test_the_largest_of_a_row_is_127_steps() -> None:
    q, scale = to_int8(ROWS)
    assert (q.int().abs().amax(1) == 127).all()
    assert ((q * scale - ROWS).abs() <= scale / 2 * 1.001).all()
