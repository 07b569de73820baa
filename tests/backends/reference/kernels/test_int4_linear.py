"""The kernel, run by Triton's interpreter, multiplies as the dequantized weight does, and that as the CPU's int4 linear."""

import pytest
import torch

from backends.reference.kernels.int4_linear import int4_linear
from backends.reference.quantization.int4 import Int4, dequantize_int4, pack_int4, quantize_int4


@pytest.mark.parametrize(
    ("n", "columns", "rows", "group"),
    [(1, 64, 16, 64), (5, 192, 80, 64), (17, 128, 64, 64), (70, 64, 144, 64), (5, 256, 80, 128)],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.float16, 5e-2)], ids=str)
def test_product_equals_the_dequantized_one(
    n: int, columns: int, rows: int, group: int, dtype: torch.dtype, tolerance: float
) -> None:
    random = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=random)
    scale_zero = torch.randn(columns // group, rows, 2, generator=random).to(dtype)
    x = torch.randn(n, columns, generator=random).to(dtype)
    scale, zero = scale_zero.float().transpose(0, 1).repeat_interleave(group, dim=1).unbind(-1)
    expected = x.float() @ ((q.float() - 8) * scale + zero).T
    packed = pack_int4(q, group)
    torch.testing.assert_close(x.float() @ dequantize_int4(packed, scale_zero, torch.float32).T, expected)
    got = int4_linear(x, packed, scale_zero)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), expected, atol=tolerance, rtol=1e-3)


def test_layouts_of_cpu_and_gpu_hold_the_same_weight() -> None:
    random = torch.Generator().manual_seed(0)
    weight, x = torch.randn(48, 128, generator=random), torch.randn(3, 128, generator=random).to(torch.bfloat16)
    q, scale_zero = quantize_int4(weight)
    expected = x.float() @ dequantize_int4(pack_int4(q, 64), scale_zero, torch.float32).T
    torch.testing.assert_close(Int4.quantize(weight)(x).float(), expected, atol=0.1, rtol=0.02)
