"""Decode attention of several query rows per sequence under a tree mask, over the slots of a KV cache.

A row sees every KV row below its piece's base and, among the piece's own rows, those whose bit is set in `seen`: 32 bits a query
row say what a dense mask would say with one number for each KV row. The query heads that share a KV head are further rows of one
tile, so K and V are read once for all of them. Softmax is computed block by block (Milakov and Gimelshein, arXiv 1805.02867; Dao et
al., arXiv 2205.14135), in float32.

Long sequences are cut into chunks that run in parallel and are joined by a second kernel (Flash-Decoding). Chunks have a fixed
length, so how the sum over a row is cut does not depend on what else is in the batch.

Rows of a quantized cache are dequantized as they are loaded, with the torch path's arithmetic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.reference.batch import Narrow

CHUNK = 512
"""KV rows of one program."""
LOG2_E = 1.4426950408889634


def tree_attention(
    q: Tensor,
    kv: Tensor,
    narrow: Narrow,
    positions: Tensor,
    out: Tensor,
    *,
    scales: Tensor | None = None,
    chunk: int = CHUNK,
) -> None:
    """Fill the rows of `out` [n, heads, head_dim] that belong to `narrow`'s pieces; other rows are left as they are.

    Args:
        q: [n, heads, head_dim], the last dimension contiguous.
        kv: [slots, rows, 2, kv_heads, head_dim], contiguous, in q's dtype or quantized. Rows past a piece's end are never read.
        positions: int64 [n], for the sliding window.
        scales: [slots, rows, 2, kv_heads] of a quantized `kv`.
        chunk: a multiple of 64.
    """
    heads, dim = q.shape[1:]
    kv_heads = kv.shape[3]
    share = heads // kv_heads
    pieces = len(narrow.pieces)
    chunks = triton.cdiv(narrow.length, chunk)
    tile = blocks(dim, q.element_size(), narrow.width * share)
    if chunks == 1:
        parts = out[None]
    else:
        parts = torch.empty((chunks, *out.shape), dtype=torch.float32, device=q.device)
    lse = torch.empty((chunks, *out.shape[:2]), dtype=torch.float32, device=q.device)
    _attend_chunk[(pieces, kv_heads * tile["TILES"], chunks)](
        q,
        kv,
        scales,
        narrow.pieces,
        narrow.seen,
        positions,
        parts,
        lse,
        q.stride(0),
        q.stride(1),
        parts.stride(0),
        lse.stride(0),
        kv.shape[1],
        dim**-0.5 * LOG2_E,
        HEADS=heads,
        SHARE=share,
        DIM=dim,
        CHUNK=chunk,
        WINDOW=narrow.window or 0,
        **tile,
        num_warps=4,
        num_stages=2,
    )
    if chunks > 1:
        _join_chunks[(pieces, narrow.width, heads)](
            parts,
            lse,
            narrow.pieces,
            out,
            parts.stride(0),
            lse.stride(0),
            HEADS=heads,
            DIM=dim,
            CHUNK=chunk,
            BLOCK_D=tile["BLOCK_D"],
        )


def blocks(dim: int, element_size: int, rows: int) -> dict[str, int]:
    """How `rows` query rows × shared heads are cut into TILES of BLOCK_M, and KV rows into blocks of BLOCK_N. `tl.dot` wants powers
    of 2 from 16 on. What is large is halved, because tiles lie in shared memory."""
    block_d = max(16, triton.next_power_of_2(dim))
    largest = 64 if block_d * element_size <= 256 else 32
    block_m = min(max(16, triton.next_power_of_2(rows)), largest)
    return {"TILES": triton.cdiv(rows, block_m), "BLOCK_M": block_m, "BLOCK_N": largest, "BLOCK_D": block_d}


@triton.jit
def _attend_chunk(
    q,
    kv,
    scales,  # None where kv is not quantized
    pieces,
    seen,
    positions,
    parts,
    lse,
    q_row,
    q_head,
    parts_chunk,
    lse_chunk,
    slot_rows,
    scale,  # of the logits, for powers of 2
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One (piece, tile of its query rows × shared heads, chunk of its KV rows): parts is the softmax-weighted mean of V over the
    chunk, lse the logarithm (base 2) of the weights' sum."""
    KV_HEADS: tl.constexpr = HEADS // SHARE
    chunk = tl.program_id(2).to(tl.int64)
    kv_head = tl.program_id(1) // TILES
    record = pieces + tl.program_id(0) * 5
    start, rows = tl.load(record), tl.load(record + 1)
    slot, base, end = tl.load(record + 2), tl.load(record + 3), tl.load(record + 4)
    low = chunk * CHUNK
    if low >= end:
        return

    m = (tl.program_id(1) % TILES) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = m < rows * SHARE
    row = start + m // SHARE
    head = kv_head * SHARE + m % SHARE
    d = tl.arange(0, BLOCK_D)
    bits = tl.load(seen + row, mask=valid, other=0)
    position = tl.load(positions + row, mask=valid, other=0)
    inside = valid[:, None] & (d < DIM)[None, :]
    queries = tl.load(q + (row * q_row + head * q_head)[:, None] + d[None, :], mask=inside, other=0.0)

    high = tl.minimum(low + CHUNK, end)
    first = low
    if WINDOW > 0:  # blocks that even the piece's first row cannot see
        first = tl.maximum(low, (base - WINDOW + 1) // BLOCK_N * BLOCK_N)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mean = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n0 in range(first, high, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        at = (slot * slot_rows + n) * (2 * KV_HEADS) + kv_head
        keys = _load_rows(kv, scales, at, n < high, d, DIM, queries.dtype)
        own = n - base
        # a shift by 32 or more is undefined, so it is clamped; own rows number fewer than 32
        path = (bits[:, None] >> tl.minimum(tl.maximum(own, 0), 31)[None, :].to(tl.int32)) & 1
        visible = ((own < 0)[None, :] | (path != 0)) & (n < high)[None, :]
        if WINDOW > 0:
            visible = visible & (n[None, :] > position[:, None] - WINDOW)
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        logits = tl.where(visible, logits, float("-inf"))
        top = tl.maximum(peak, tl.max(logits, 1))
        shift = tl.where(top == float("-inf"), 0.0, top)  # nothing seen so far: -inf - -inf is NaN
        weights = tl.exp2(logits - shift[:, None])
        fade = tl.exp2(peak - shift)
        values = _load_rows(kv, scales, at + KV_HEADS, n < high, d, DIM, queries.dtype)
        mean = mean * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * fade + tl.sum(weights, 1)
        peak = top
    mean = mean / tl.where(total == 0.0, 1.0, total)[:, None]
    at = row * HEADS + head
    tl.store(parts + chunk * parts_chunk + at[:, None] * DIM + d[None, :], mean.to(parts.dtype.element_ty), mask=inside)
    tl.store(lse + chunk * lse_chunk + at, peak + tl.log2(total), mask=valid)


@triton.jit
def _load_rows(kv, scales, at, written, d, DIM: tl.constexpr, dtype: tl.constexpr):
    """K or V of one head, [len(at), len(d)] in `dtype`: `at` counts rows of DIM numbers. 0 where nothing is written."""
    rows = tl.load(kv + at[:, None] * DIM + d[None, :], mask=written[:, None] & (d < DIM)[None, :], other=0.0)
    if scales is not None:
        scale = tl.load(scales + at, mask=written, other=0.0)
        rows = (rows.to(tl.float32) * scale[:, None]).to(dtype)
    return rows


@triton.jit
def _join_chunks(
    parts,
    lse,
    pieces,
    out,
    parts_chunk,
    lse_chunk,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One (piece, query row, head): the mean over chunks, weighted by 2^lse. Chunks past the piece's end were not written."""
    record = pieces + tl.program_id(0) * 5
    if tl.program_id(1) >= tl.load(record + 1):
        return
    at = (tl.load(record) + tl.program_id(1)) * HEADS + tl.program_id(2)
    end = tl.load(record + 4)
    d = tl.arange(0, BLOCK_D)
    peak = float("-inf")
    total = 0.0
    mean = tl.zeros([BLOCK_D], tl.float32)
    for chunk in range(0, tl.cdiv(end, CHUNK)):
        part = tl.load(parts + chunk * parts_chunk + at * DIM + d, mask=d < DIM, other=0.0)
        weight = tl.load(lse + chunk * lse_chunk + at)
        top = tl.maximum(peak, weight)
        shift = tl.where(top == float("-inf"), 0.0, top)
        fade = tl.exp2(peak - shift)
        weight = tl.exp2(weight - shift)
        mean = mean * fade + part * weight
        total = total * fade + weight
        peak = top
    tl.store(out + at * DIM + d, (mean / total).to(out.dtype.element_ty), mask=d < DIM)
