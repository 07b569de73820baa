"""The cache's rows: what quantizing loses, that every move takes the scales along, and what it takes in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backends.reference.drafters.head_cache import HeadKV
from backends.reference.kv_cache import LEAST_SCALE, QUANTIZED, KVCache, dequantize, quantize, token_bytes
from backends.reference.options import KV_CACHE_DTYPES

SHAPE = HeadKV(num_layers=2, num_kv_heads=3, head_dim=8)
CPU = torch.device("cpu")
QUANTIZED_NAMES = sorted(QUANTIZED)


def test_every_type_of_the_command_line_is_known_here() -> None:
    assert {"auto", *QUANTIZED} == set(KV_CACHE_DTYPES)


@st.composite
def keys_and_values(draw: st.DrawFn) -> Tensor:
    """float32 [n, dim], rows of very different size, some of them all zeros."""
    n, dim = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    numbers = st.floats(-1, 1, width=32, allow_subnormal=False)
    sizes = st.sampled_from([0.0, 1e-40, 1e-30, 1e-6, 1.0, 300.0, 6e4, 1e30])
    return torch.tensor([[draw(sizes) * draw(numbers) for _ in range(dim)] for _ in range(n)], dtype=torch.float32)


@given(keys_and_values())
def test_int8_errs_by_half_a_step_of_which_the_largest_number_has_127(rows: Tensor) -> None:
    q, scales = quantize(rows, "int8")
    assert q.dtype == torch.int8
    assert q.abs().max() <= 127
    step = rows.double().abs().amax(-1, keepdim=True) / 127
    error = (dequantize(q, scales, torch.float32).double() - rows.double()).abs()
    assert (error <= step * 0.5001 + LEAST_SCALE).all()


@given(keys_and_values())
def test_fp8_errs_by_a_sixteenth_of_a_number_or_half_of_its_finest_step(rows: Tensor) -> None:
    """e4m3 has three bits of mantissa, and steps of 2^-9 where they end."""
    q, scales = quantize(rows, "fp8")
    assert q.dtype == torch.float8_e4m3fn
    finest = rows.double().abs().amax(-1, keepdim=True) / 448 * 2**-9
    error = (dequantize(q, scales, torch.float32).double() - rows.double()).abs()
    assert (error <= torch.maximum(rows.double().abs() / 16, finest / 2) * 1.0001 + LEAST_SCALE).all()


@pytest.mark.parametrize("stored", QUANTIZED_NAMES)
@given(rows=keys_and_values())
def test_a_row_is_quantized_by_itself_and_again_to_the_same(stored: str, rows: Tensor) -> None:
    q, scales = quantize(rows, stored)
    for i in range(len(rows)):
        alone, scale = quantize(rows[i], stored)
        assert torch.equal(alone.float(), q[i].float())
        assert scale == scales[i]
    again, _ = quantize(dequantize(q, scales, torch.float32), stored)
    assert torch.equal(again.float(), q.float())


def test_every_finite_number_of_fp8_is_read_as_torch_reads_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes[codes.float().isfinite()][:, None]
    assert len(finite) == 254
    assert torch.equal(dequantize(finite, torch.full((254,), 0.3), torch.float32), finite.float() * 0.3)


def test_what_is_no_number_stays_none() -> None:
    for stored in QUANTIZED:
        q, scales = quantize(torch.tensor([[1.0, torch.nan], [1.0, 2.0]]), stored)
        assert dequantize(q, scales, torch.float32).isnan().tolist() == [[True, True], [False, False]]


def cache_of(stored: str, dtype: torch.dtype = torch.float32, slots: int = 3, rows: int = 20) -> KVCache:
    return KVCache(SHAPE, slots=slots, rows=rows, dtype=dtype, device=CPU, stored=stored)


def random_rows(n: int, seed: int = 0) -> Tensor:
    """[n, 2, kv_heads, head_dim]; sizes differ a hundredfold, so that a scale in the wrong place is seen."""
    random = torch.Generator().manual_seed(seed)
    sizes = 10 ** (2 * torch.rand(n, 2, SHAPE.num_kv_heads, 1, generator=random) - 1)
    return sizes * torch.randn(n, 2, SHAPE.num_kv_heads, SHAPE.head_dim, generator=random)


def stored_rows(cache: KVCache, layer: int, slot: int, length: int) -> Tensor:
    """What `read` gives, as [length, 2, kv_heads, head_dim]."""
    keys, values = cache.read(layer, slot, 1, length)
    return torch.stack((keys[0].transpose(0, 1), values[0].transpose(0, 1)), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stored", KV_CACHE_DTYPES)
def test_what_is_written_is_read_and_nothing_else_changes(stored: str, dtype: torch.dtype) -> None:
    cache = cache_of(stored, dtype)
    before, rows = random_rows(20).to(dtype), random_rows(3, seed=1).to(dtype)
    cache.write(1, 20 + torch.arange(20), before)
    cache.write(1, 20 + torch.tensor([2, 11, 7]), rows)
    expected = before.clone()
    expected[[2, 11, 7]] = rows
    if stored != "auto":
        expected = dequantize(*quantize(expected, stored), dtype)
    assert torch.equal(stored_rows(cache, 1, 1, 20), expected)
    assert stored_rows(cache, 1, 1, 20).dtype == dtype
    for layer, slot in ((0, 1), (1, 0), (1, 2)):
        assert not stored_rows(cache, layer, slot, 20).any()
    keys, _ = cache.read(1, 0, 2, 12)
    assert keys.shape == (2, SHAPE.num_kv_heads, 12, SHAPE.head_dim)
    assert torch.equal(keys[1].transpose(0, 1), expected[:12, 0])


@pytest.mark.parametrize("stored", KV_CACHE_DTYPES)
def test_an_accepted_path_and_a_prefix_move_with_their_scales(stored: str) -> None:
    cache = cache_of(stored)
    for layer in range(SHAPE.num_layers):
        for slot in range(2):
            cache.write(layer, 20 * slot + torch.arange(20), random_rows(20, seed=10 * layer + slot))
    before = [[stored_rows(cache, layer, slot, 20) for slot in range(2)] for layer in range(SHAPE.num_layers)]
    cache.keep_paths([(0, 5, (2, 4, 7)), (1, 3, (1, 2)), (1, 9, (1, 3))])  # the second is a chain
    cache.copy_rows(0, 2, 8)
    for layer in range(SHAPE.num_layers):
        first, second = (rows.clone() for rows in before[layer])
        first[6:9] = before[layer][0][[7, 9, 12]]
        second[11] = before[layer][1][12]
        assert torch.equal(stored_rows(cache, layer, 0, 20), first)
        assert torch.equal(stored_rows(cache, layer, 1, 20), second)
        assert torch.equal(stored_rows(cache, layer, 2, 8), first[:8])
        assert not stored_rows(cache, layer, 2, 20)[8:].any()


def tensors(cache: KVCache) -> Iterator[Tensor]:
    for layer in range(SHAPE.num_layers):
        yield cache.layer(layer)
        if (scales := cache.scales(layer)) is not None:
            yield scales


@pytest.mark.parametrize(
    ("stored", "dtype", "wanted"),
    [
        ("auto", torch.float32, 2 * 2 * 3 * 8 * 4),
        ("auto", torch.bfloat16, 2 * 2 * 3 * 8 * 2),
        ("int8", torch.float32, 2 * 2 * 3 * (8 + 4)),  # a scale of four bytes with each K and V of a head
        ("fp8", torch.bfloat16, 2 * 2 * 3 * (8 + 4)),
    ],
)
def test_a_token_takes_the_bytes_that_capacity_counts(stored: str, dtype: torch.dtype, wanted: int) -> None:
    assert token_bytes(SHAPE, dtype, stored) == wanted
    cache = cache_of(stored, dtype, slots=3, rows=20)
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors(cache)) == 3 * 20 * wanted
