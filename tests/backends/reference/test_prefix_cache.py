"""Prompts that begin alike are computed once, with every drafter, and nothing else changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tiny_models import HEADS, TREE, Build, generate, head_from_scratch, name, request

from backends.counters import parse_metrics
from backends.reference.batch import Piece, build_batch
from backends.reference.engine import LEAST_PREFIX, Engine
from backends.reference.kv_cache import KVCache
from backends.reference.metrics import render
from backends.serving import GenerationRequest

SHARED = 40


def requests(count: int = 8) -> list[GenerationRequest]:
    """40 tokens in common, then 5 to 12 that differ from the first on; half of them sampled."""
    rng = random.Random(4)
    system = [rng.randrange(256) for _ in range(SHARED)]
    prompts = [[*system, i, *(rng.randrange(256) for _ in range(rng.randint(4, 11)))] for i in range(count)]
    return [request(p, 14, temperature=0.8 * (i % 2), seed=i, ignore_eos=True) for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(build: Build) -> list[list[int]]:
    return generate(build(prefix_caching=False), requests())


def hits(engine: Engine) -> tuple[int, int]:
    counters, _ = parse_metrics("reference", render(engine, "tiny"))
    assert counters.prompt_tokens == counters.prefix_query_tokens == sum(len(r.prompt_ids) for r in requests())
    return counters.prefix_hit_tokens or 0, engine.counters.generated_tokens


@pytest.mark.parametrize(("variant", "tree"), [("off", {}), ("suffix", {}), ("draft_model", {}), *HEADS], ids=name)
def test_one_after_another_each_takes_over_what_is_common(
    variant: str, tree: dict[str, int], build: Build, expected: list[list[int]]
) -> None:
    """A head's row t needs token t + 1, so that heads take over one token less."""
    engine = build(variant, 0 if variant == "off" else 3, max_num_seqs=1, **tree)
    assert generate(engine, requests()) == expected
    less = variant in ("eagle2", "eagle3", "p_eagle", "mtp")
    assert hits(engine) == (7 * (SHARED - less), 8 * 14)


@pytest.mark.parametrize(("variant", "tree"), [("off", {}), ("draft_model", {}), ("medusa", {}), ("eagle3", TREE)], ids=name)
def test_running_sequences_are_copied_from(variant: str, tree: dict[str, int], build: Build, expected: list[list[int]]) -> None:
    """A budget of one prompt a step: the second request finds the first one running."""
    engine = build(variant, 0 if variant == "off" else 3, max_num_seqs=4, max_num_batched_tokens=52, **tree)
    assert generate(engine, requests()) == expected
    assert hits(engine)[0] > 3 * (SHARED - 1)


def test_it_can_be_switched_off_and_ignores_short_prefixes(build: Build) -> None:
    engine = build(prefix_caching=False, max_num_seqs=1)
    generate(engine, requests())
    assert hits(engine)[0] == 0
    engine = build(max_num_seqs=1)
    generate(engine, [request([*range(LEAST_PREFIX - 1), 99 + i, 7], 4) for i in range(3)])
    assert engine.counters.prefix_hit_tokens == 0


def test_a_prompt_that_comes_again_computes_its_last_token_only(build: Build) -> None:
    engine = build(max_num_seqs=1)
    prompt = list(requests()[0].prompt_ids)
    first, again = generate(engine, [request(prompt), request(prompt)])
    assert first == again
    assert engine.counters.prefix_hit_tokens == len(prompt) - 1


def test_a_preempted_sequence_finds_its_own_rows(build: Build, sampled: list[list[int]]) -> None:
    """Rows of its own that are still in a slot are no hit, and what it computes again is no new prompt."""
    engine = build(max_model_len=120, kv_cache_tokens=180, max_num_seqs=3)
    made = generate(engine, requests())
    assert made == generate(build(prefix_caching=False), requests())
    assert engine.counters.preemptions > 0
    assert engine.counters.prefix_query_tokens == sum(len(r.prompt_ids) for r in requests())


@pytest.mark.parametrize(
    ("variant", "tree"), [("draft_model", {}), ("eagle3", {}), ("eagle3", TREE), ("p_eagle", {})], ids=name
)
def test_caches_equal_a_recomputation(variant: str, tree: dict[str, int], build: Build) -> None:
    engine = build(variant, 3, max_num_seqs=3, max_num_batched_tokens=56, **tree)
    for one in requests():
        engine.add(one)
    compared = 0
    while engine.has_work:
        engine.step()
        for s in engine.scheduler.running:
            _same(engine.cache, s.slot, _recomputed(engine.model, s.tokens[: s.computed]))
            compared += bool(s.reused)
            if variant == "draft_model":
                known = engine.drafter._catch_up(s).base  # type: ignore[attr-defined]
                _same(engine.drafter._cache, s.slot, _recomputed(engine.drafter._model, s.tokens[:known]))  # type: ignore[attr-defined]
            elif rows := engine.drafter.cache._taken[s.slot]:  # type: ignore[attr-defined]
                blocks = [torch.stack(pair, 1) for pair in head_from_scratch(engine, s.tokens[: rows + 1])[0]]
                _same(engine.drafter.cache._kv, s.slot, blocks)  # type: ignore[attr-defined]
    assert compared > 10


def _recomputed(model: Any, tokens: list[int]) -> list[torch.Tensor]:
    if not tokens:
        return []
    cache = KVCache(model.config, slots=1, rows=len(tokens), dtype=model.dtype, device=model.device)
    model.forward(build_batch([Piece(0, 0, tokens)], slot_rows=len(tokens), dtype=model.dtype, device=model.device), cache)
    return [layer[0] for layer in cache._layers]


def _same(cache: KVCache, slot: int, expected: list[torch.Tensor]) -> None:
    for kept, wanted in zip(cache._layers, expected, strict=False):
        torch.testing.assert_close(kept[slot, : len(wanted)], wanted, atol=1e-4, rtol=1e-4)


def test_after_a_reset_nothing_is_taken_over_from_what_has_finished(build: Build, expected: list[list[int]]) -> None:
    engine = build(max_num_seqs=1)
    assert generate(engine, requests()[:1]) == expected[:1]
    engine.reset_prefix_cache()
    assert generate(engine, requests()[1:2]) == expected[1:2]
    assert engine.counters.prefix_hit_tokens == 0
    assert generate(engine, requests()[2:3]) == expected[2:3]
    assert engine.counters.prefix_hit_tokens == SHARED
