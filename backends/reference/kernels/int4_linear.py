"""y = x Wᵀ with int4 weights for few rows: each weight is read once, as half a byte, and never written out whole.

W ≈ (q - 8) × scale + zero by groups of inputs, so that a group's part of the sum is scale × (x · (q - 8)) + zero × sum(x): products
are of x with small integers, exact in every dtype, and scales are applied in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.reference.kernels import launching_on

BLOCK_N = 64  # output channels of one program


def int4_linear(x: Tensor, packed: Tensor, scale_zero: Tensor) -> Tensor:
    """[n, out] in x's dtype, summed in float32.

    Args:
        x: [n, in].
        packed: uint8 [out, in / 2]; in each group of inputs the second half of them are the high halves.
        scale_zero: [groups, out, 2], groups of 64 or 128 inputs.
    """
    x = x.contiguous()
    n, columns = x.shape
    rows = len(packed)
    y = torch.empty(n, rows, dtype=x.dtype, device=x.device)
    block_m = max(16, triton.next_power_of_2(min(n, 64)))
    with launching_on(x.device):
        _int4_rows[(triton.cdiv(rows, BLOCK_N), triton.cdiv(n, block_m))](
            x,
            packed,
            scale_zero,
            y,
            n,
            rows,
            columns,
            BLOCK_M=block_m,
            BLOCK_N=BLOCK_N,
            HALF=columns // len(scale_zero) // 2,
            num_warps=4,
            num_stages=2,
        )
    return y


@triton.jit
def _int4_rows(x, packed, scale_zero, y, n, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HALF: tl.constexpr):
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    out = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, HALF)
    there, real = (m < n)[:, None], out < rows
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in range(0, columns // (2 * HALF)):
        at = x + m[:, None] * columns + group * (2 * HALF) + j[None, :]
        low = tl.load(at, mask=there, other=0.0)
        high = tl.load(at + HALF, mask=there, other=0.0)
        both = tl.load(packed + out[None, :] * (columns // 2) + group * HALF + j[:, None], mask=real[None, :], other=0)
        scale = tl.load(scale_zero + (group * rows + out) * 2, mask=real, other=0.0).to(tl.float32)
        zero = tl.load(scale_zero + (group * rows + out) * 2 + 1, mask=real, other=0.0).to(tl.float32)
        q_low = ((both & 15).to(tl.int32) - 8).to(low.dtype)
        q_high = ((both >> 4).to(tl.int32) - 8).to(low.dtype)
        product = tl.dot(low, q_low, input_precision="ieee") + tl.dot(high, q_high, input_precision="ieee")
        total = tl.sum(low.to(tl.float32), 1) + tl.sum(high.to(tl.float32), 1)
        sums += product * scale[None, :] + total[:, None] * zero[None, :]
    tl.store(y + m[:, None] * rows + out[None, :], sums.to(y.dtype.element_ty), mask=there & real[None, :])
