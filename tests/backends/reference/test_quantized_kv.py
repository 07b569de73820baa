"""The engine over a quantized KV cache: the same text whatever is drafted, batched and cut, in less memory.

Rounding to 8 bits has edges. In float32 the sums of another batch shape differ by 1e-7, which puts a number on the other side of an
edge once in many thousand: it then differs by a whole step, and at a near-tie the token does. That is the arithmetic's doing and not
the engine's, so that these tests compute in float64, where it does not happen.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import ALL, PROMPTS, TREE, Build, generate, name, request, sampled_requests

from backends.counters import parse_metrics
from backends.reference import kernels, loader
from backends.reference.batch import Piece, build_batch
from backends.reference.drafters.draft_model import DraftModel
from backends.reference.engine import Engine
from backends.reference.kv_cache import KVCache
from backends.reference.metrics import render
from backends.reference.model import Decoder
from backends.types import ConfigError

STORED = ("fp8", "int8")


@pytest.fixture(autouse=True)
def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loader.DTYPES, "float64", torch.float64)


@pytest.fixture(scope="module")
def plain(build: Build) -> Callable[..., list[list[int]]]:
    """Texts of `sampled_requests` over a cache of that type, without speculation, one sequence at a time."""

    @cache
    def texts(stored: str, dtype: str = "float64") -> list[list[int]]:
        return generate(build(dtype=dtype, kv_cache_dtype=stored, max_num_seqs=1), sampled_requests())

    return texts


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("variant", "tree"), [("off", {}), *ALL], ids=name)
def test_sampled_text_is_the_same_whatever_is_drafted_and_batched(
    variant: str, tree: dict[str, int], stored: str, batch: int, build: Build, plain: Callable[..., list[list[int]]]
) -> None:
    """The order is shuffled."""
    order = list(range(16))
    random.Random(f"{variant}{stored}{batch}").shuffle(order)
    order = order[: 2 * batch]
    requests = sampled_requests()
    k = 0 if variant == "off" else 4
    engine = build(variant, k, dtype="float64", kv_cache_dtype=stored, max_num_seqs=batch, **tree)
    assert generate(engine, [requests[i] for i in order]) == [plain(stored)[i] for i in order]


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("variant", "tree"), [("off", {}), ("ngram", {}), ("eagle3", {}), ("eagle3", TREE)], ids=name)
def test_float32_meets_no_edge_here(
    variant: str, tree: dict[str, int], stored: str, build: Build, plain: Callable[..., list[list[int]]]
) -> None:
    engine = build(variant, 0 if variant == "off" else 4, kv_cache_dtype=stored, **tree)
    assert generate(engine, sampled_requests()) == plain(stored, "float32")


@pytest.mark.parametrize("fields", [{"max_num_batched_tokens": 24}, {"max_model_len": 120, "kv_cache_tokens": 220}], ids=str)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("variant", "tree"), [("draft_model", {}), ("eagle3", {}), ("eagle3", TREE)], ids=name)
def test_chunked_prompts_and_preemption_do_not_change_the_text(
    variant: str,
    tree: dict[str, int],
    stored: str,
    fields: dict[str, int],
    build: Build,
    plain: Callable[..., list[list[int]]],
) -> None:
    engine = build(variant, 3, dtype="float64", kv_cache_dtype=stored, **fields, **tree)
    assert generate(engine, sampled_requests()) == plain(stored)
    assert bool(engine.counters.preemptions) == ("kv_cache_tokens" in fields)
    assert engine.counters.accepted_tokens > 0


@pytest.mark.parametrize("stored", STORED)
def test_prefixes_are_taken_over_with_their_scales(stored: str, build: Build) -> None:
    """By all but the first two, which start together; a head takes over one token less."""
    shared = PROMPTS[0] + PROMPTS[1]
    requests = [request([*shared, i, *PROMPTS[i]], 14, temperature=0.8 * (i % 2), seed=i) for i in range(6)]
    fields: dict[str, Any] = {"dtype": "float64", "kv_cache_dtype": stored, "max_num_seqs": 2}
    expected = generate(build(prefix_caching=False, **fields), requests)
    engine = build("eagle3", 3, **TREE, **fields)
    assert generate(engine, requests) == expected
    assert engine.counters.prefix_hit_tokens == 4 * (len(shared) - 1)


def test_text_over_a_quantized_cache_is_nearly_the_text_without(
    build: Build, plain: Callable[..., list[list[int]]], sampled: list[list[int]]
) -> None:
    """And not quite: a cache that quantized nothing would give all of it."""
    for stored in STORED:
        pairs = [pair for ours, theirs in zip(plain(stored), sampled, strict=True) for pair in zip(ours, theirs, strict=True)]
        same = sum(a == b for a, b in pairs)
        assert len(pairs) / 4 < same < len(pairs), stored


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("variant", "tree"), [("draft_model", {}), ("eagle3", TREE)], ids=name)
def test_after_every_step_the_caches_equal_a_recomputation(
    variant: str, tree: dict[str, int], stored: str, build: Build
) -> None:
    """Bit for bit."""
    fields = {"dtype": "float64", "kv_cache_dtype": stored, "max_num_seqs": 4, "max_num_batched_tokens": 40}
    engine = build(variant, 4, **fields, **tree)
    for i, prompt in enumerate(PROMPTS[:6]):
        engine.add(request(prompt, 12, temperature=0.8 * (i % 2), seed=i))
    while engine.has_work:
        engine.step()
        for s in engine.scheduler.running:
            _same(engine.cache, s.slot, _recomputed(engine.model, s.tokens[: s.computed], stored))
            if isinstance(engine.drafter, DraftModel) and (known := engine.drafter._catch_up(s).base):
                _same(engine.drafter._cache, s.slot, _recomputed(engine.drafter._model, s.tokens[:known], stored))


def _recomputed(model: Decoder, tokens: list[int], stored: str) -> KVCache:
    cache = KVCache(model.config, slots=1, rows=len(tokens), dtype=model.dtype, device=model.device, stored=stored)
    model.forward(build_batch([Piece(0, 0, tokens)], slot_rows=len(tokens), dtype=model.dtype, device=model.device), cache)
    return cache


def _same(kept: KVCache, slot: int, wanted: KVCache) -> None:
    for layer in range(len(wanted._layers)):
        assert torch.equal(kept.layer(layer)[slot, : wanted.rows].float(), wanted.layer(layer)[0].float())
        torch.testing.assert_close(kept._scales[layer][slot, : wanted.rows], wanted._scales[layer][0])


def test_a_quarter_of_the_memory_holds_more_tokens(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 layers, K and V of 2 KV heads of 16 numbers: 2,048 bytes a token in float32, 640 with a byte each and a scale."""
    monkeypatch.setattr("backends.reference.engine.psutil.virtual_memory", lambda: SimpleNamespace(total=4 * 2048 * 1000))
    assert build().capacity_tokens == 1000
    assert {build(kv_cache_dtype=stored).capacity_tokens for stored in STORED} == {3200}


@pytest.mark.parametrize("variant", ["draft_model", "eagle3", "p_eagle", "mtp"])
def test_a_drafter_s_cache_is_of_the_target_s_type(variant: str, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """And counts as such: with it there are three times the tokens, too."""
    monkeypatch.setattr("backends.reference.engine.psutil.virtual_memory", lambda: SimpleNamespace(total=4 * 2048 * 1500))

    def stored_in(engine: Engine) -> torch.dtype:
        drafter: Any = engine.drafter
        return (drafter._cache if variant == "draft_model" else drafter.cache._kv).layer(0).dtype

    plain, quantized = build(variant, 2), build(variant, 2, kv_cache_dtype="int8")
    assert (stored_in(plain), stored_in(quantized)) == (torch.float32, torch.int8)
    assert quantized.capacity_tokens == pytest.approx(3.2 * plain.capacity_tokens, rel=0.01)


@pytest.mark.parametrize("stored", ["auto", *STORED])
def test_the_page_says_how_much_of_the_cache_is_used(stored: str, build: Build) -> None:
    engine = build("ngram", 3, kv_cache_dtype=stored, max_model_len=200, kv_cache_tokens=1000)
    for prompt in PROMPTS[:4]:
        engine.add(request(prompt))
    for _ in range(4):
        engine.step()
    _, gauges = parse_metrics("reference", render(engine, "tiny"))
    held = sum(sequence.computed for sequence in engine.scheduler.running)
    assert held > sum(map(len, PROMPTS[:4]))
    assert gauges.kv_use == pytest.approx(held / 1000)
    assert engine.resolved()["kv_cache_dtype"] == stored


def test_fp8_is_refused_where_kernels_cannot_read_it(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not kernels.reads_fp8(torch.device("cuda"))
    assert kernels.reads_fp8(torch.device("cpu"))
    with pytest.raises(ConfigError, match="fp8 needs a GPU of compute capability"):
        build(kv_cache_dtype="fp8", device="cuda")
