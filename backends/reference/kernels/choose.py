"""A token for each row of logits in one launch: argmax, or the exponential race of `sampling.race` with its noise made on the fly."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.reference.kernels import launching_on

BLOCK = 4096


def choose_rows(logits: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    """Token ids int64 [n] of float32 `logits` [n, vocab]; of equal scores the first token's.

    Args:
        temperatures: float32 [n]; 0 is greedy.
        keys: int32 [n, 2], low and high half of the noise's key (`sampling.noise_key`); not used by greedy rows.
    """
    n, vocab = logits.shape
    out = torch.empty(n, dtype=torch.int64, device=logits.device)
    with launching_on(logits.device):
        _choose_row[(n,)](logits, temperatures, keys, out, logits.stride(0), vocab, BLOCK=BLOCK, num_warps=8)
    return out


@triton.jit
def _choose_row(logits, temperatures, keys, out, stride, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    low = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
    high = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
    best = float("-inf")
    token = 0
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        score = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf"))
        if temperature > 0:
            score = score / temperature - _log_exponential(ids, low, high)
        top, at = tl.max(score, 0, return_indices=True)
        token = tl.where(top > best, first + at, token)
        best = tl.maximum(best, top)
    tl.store(out + row, token)


@triton.jit
def _log_exponential(ids, low, high):
    """As `sampling.log_exponential`. There is no log1p in the interpreter: W. Kahan's, exact to some ulp, takes its place."""
    bits = _mix32(_mix32(ids.to(tl.uint32, bitcast=True) ^ low) ^ high) & 0x7FFFFFFF
    u = tl.minimum(bits.to(tl.float32) * 2.0**-31 + 2.0**-32, 1 - 2.0**-24)
    w = 1 - u
    exponential = tl.where(w == 1, u, -tl.log(w) * (u / tl.where(w == 1, 1.0, 1 - w)))
    return tl.log(exponential)


@triton.jit
def _mix32(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)
