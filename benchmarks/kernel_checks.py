"""Triton kernels against the torch path on random data of odd sizes: on a GPU here, in Triton's interpreter by the tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backends.reference.attention import attend
from backends.reference.batch import Piece, build_batch, narrow_rows
from backends.reference.drafters.head_cache import HeadKV
from backends.reference.kernels import launching_on
from backends.reference.kernels.tree_attention import CHUNK, tree_attention
from backends.reference.kv_cache import KVCache
from backends.reference.sampling import Sampling, choose

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error of an output against float32 on the same rounded inputs; outputs are means of standard normal values."""

CHAIN = tuple(range(30))
BUSHY = (0, 0, 0, 1, 1, 2, 4, 4, 7, 3, 10, 10)
BINARY = tuple((node - 1) // 2 for node in range(1, 31))


def chain(slot: int, base: int, new: int) -> Piece:
    return Piece(slot, base, [0] * new)


def tree(slot: int, base: int, parents: tuple[int, ...], done: int = 0) -> Piece:
    return Piece(slot, base, [0] * (len(parents) + 1 - done), parents, done)


@dataclass(frozen=True, slots=True)
class Case:
    """Pieces lie in any slots of a cache of `rows` rows; one of 32 or more new tokens is not the kernel's."""

    heads: int
    kv_heads: int
    head_dim: int
    pieces: tuple[Piece, ...]
    window: int | None = None
    chunk: int = CHUNK
    rows: int = 300


CASES = {
    "one token each, odd lengths": Case(
        9, 3, 64, tuple(chain(s, base, 1) for s, base in enumerate((0, 1, 62, 63, 64, 65, 127)))
    ),
    "chains of unequal length, slots apart": Case(
        4, 2, 32, (chain(0, 0, 5), chain(2, 17, 1), chain(3, 129, 8), chain(7, 63, 3))
    ),
    "trees of unequal size": Case(6, 2, 20, (tree(1, 40, BUSHY), tree(2, 1, (0,)), tree(5, 0, (0, 0, 1)), chain(6, 77, 4))),
    "levels of trees": Case(4, 1, 48, (tree(0, 33, BUSHY, 4), tree(1, 8, BUSHY[:7], 7), chain(2, 5, 2))),
    "31 own rows, shared by 8 heads": Case(8, 1, 16, (tree(0, 100, BINARY), tree(1, 3, CHAIN), chain(2, 64, 31))),
    "no shared heads, head_dim 80": Case(3, 3, 80, (chain(0, 70, 2), tree(1, 11, BUSHY))),
    "head_dim 13": Case(2, 1, 13, (chain(0, 3, 3), chain(1, 66, 1))),
    "head_dim 192": Case(2, 1, 192, (chain(0, 90, 3), tree(1, 31, BUSHY))),
    "several chunks": Case(4, 2, 32, (chain(0, 290, 5), tree(1, 150, BUSHY), chain(2, 63, 1), chain(3, 64, 2)), chunk=64),
    "a window": Case(4, 2, 32, (chain(0, 200, 5), tree(1, 100, BUSHY), chain(2, 3, 2), chain(3, 23, 2)), window=24),
    "a window over chunks": Case(4, 2, 32, (chain(0, 250, 5), tree(1, 120, BUSHY), chain(2, 3, 2)), window=70, chunk=64),
    "beside a prompt": Case(4, 2, 32, (chain(0, 20, 40), tree(1, 30, BUSHY), chain(2, 0, 33), chain(3, 9, 2))),
}


def attention_error(case: Case, dtype: torch.dtype, device: torch.device, stored: str = "auto") -> float:
    """Largest absolute difference between kernel and torch path over a KV cache of type `stored`. Unwritten KV rows and the output
    hold NaN before.

    Raises:
        AssertionError: a row of the output that is not the kernel's was touched.
    """
    shape = HeadKV(1, case.kv_heads, case.head_dim)
    slots = max(piece.slot for piece in case.pieces) + 1
    cpu = torch.device("cpu")
    batch = build_batch(case.pieces, slot_rows=case.rows, dtype=torch.float32, device=cpu, window=case.window)
    random = torch.Generator().manual_seed(0)
    n = len(batch.token_ids)
    q = torch.randn(n, case.heads + 1, case.head_dim, generator=random).to(dtype)[:, 1:]  # a view, as the engine's
    plain = KVCache(shape, slots=slots, rows=case.rows, dtype=torch.float32, device=cpu)
    poisoned = KVCache(shape, slots=slots, rows=case.rows, dtype=dtype, device=cpu, stored=stored)
    (poisoned.layer(0) if stored == "auto" else poisoned.scales(0)).fill_(torch.nan)
    for piece in case.pieces:
        end = piece.base + piece.done + len(piece.tokens)
        rows = piece.slot * case.rows + torch.arange(end)
        poisoned.write(0, rows, torch.randn(end, 2, case.kv_heads, case.head_dim, generator=random).to(dtype))
        keys, values = poisoned.read(0, piece.slot, 1, end)
        plain.write(0, rows, torch.stack((keys[0], values[0])).permute(2, 0, 1, 3).float())
    expected = attend(q.float(), batch, plain, 0)

    narrow_pieces = [piece for piece in case.pieces if piece.done + len(piece.tokens) < 32]
    narrow = narrow_rows(narrow_pieces, batch.starts, n, device, case.window)
    out = torch.full(expected.shape, torch.nan, dtype=dtype, device=device)
    kv, scales = poisoned.layer(0).to(device), poisoned.scales(0)
    scales = None if scales is None else scales.to(device)
    with launching_on(device):
        tree_attention(q.to(device), kv, narrow, batch.positions.to(device), out, scales=scales, chunk=case.chunk)
    got = out.float().cpu()
    ours = narrow.seen.cpu() != 0
    assert got[~ours].isnan().all(), "rows of other pieces were written"
    return float((got[ours] - expected[ours]).abs().max().nan_to_num(torch.inf))


def other_choices(device: torch.device, rows: int = 64, vocab: int = 128_256) -> int:
    """Rows of random logits for which `device` chooses another token than the CPU: none, unless two scores tie to an ulp."""
    logits = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    where = [(Sampling(0.8 * (i % 4 > 0), seed=i), i) for i in range(rows)]
    pairs = zip(choose(logits, where), choose(logits.to(device), where), strict=True)
    return sum(ours != theirs for ours, theirs in pairs)
