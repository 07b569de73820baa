"""Every variant, as chain and as tree, on the tiny model in float32: the text is the target's."""

from __future__ import annotations

import importlib
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from tiny_models import ALL, HEADS, PROMPTS, TREE, Build, generate, name, request, sampled_requests, target_pass

from backends.reference.sampling import Sampling, probabilities
from backends.types import ConfigError
from tests.backends.reference.heads import published


def tree_of(k: int) -> dict[str, int]:
    """A tree of width 3 and depth `k`, with the nodes it can have."""
    return {"topk": 3, "num_draft_tokens": min(12, 4 + 9 * (k - 1))}


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize(("variant", "tree"), [("off", {}), *ALL], ids=name)
def test_greedy_text_equals_transformers(
    variant: str, tree: dict[str, int], batch: int, build: Build, greedy: list[list[int]]
) -> None:
    engine = build(variant, 0 if variant == "off" else 4, max_num_seqs=batch, **tree)
    count = min(16, 4 * batch)
    assert generate(engine, [request(prompt) for prompt in PROMPTS[:count]]) == greedy[:count]


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("k", range(1, 7))
@pytest.mark.parametrize(("variant", "tree"), ALL, ids=name)
def test_sampled_text_is_the_same_whatever_is_drafted_and_batched(
    variant: str, tree: dict[str, int], k: int, batch: int, build: Build, sampled: list[list[int]]
) -> None:
    """`sampled` was made without speculation, one sequence at a time. The order is shuffled."""
    order = list(range(16))
    random.Random(f"{variant}{k}{batch}").shuffle(order)
    order = order[: 2 * batch]
    requests = sampled_requests()
    made = generate(build(variant, k, max_num_seqs=batch, **tree and tree_of(k)), [requests[i] for i in order])
    assert made == [sampled[i] for i in order]


@pytest.mark.parametrize(("variant", "tree"), HEADS, ids=name)
def test_heads_are_right_often_enough_for_these_tests_to_mean_something(
    variant: str, tree: dict[str, int], build: Build
) -> None:
    engine = build(variant, 3, **tree)
    generate(engine, sampled_requests())
    counters = engine.counters
    assert counters.accepted_per_position[0] > 0.12 * counters.decode_steps
    assert counters.accepted_per_position[1] > 0
    assert counters.accepted_tokens < 0.9 * counters.draft_tokens


@pytest.mark.parametrize("fields", [{"max_num_batched_tokens": 24}, {"max_model_len": 120, "kv_cache_tokens": 220}], ids=str)
@pytest.mark.parametrize(("variant", "tree"), HEADS, ids=name)
def test_chunked_prompts_and_preemption_do_not_change_the_text(
    variant: str, tree: dict[str, int], fields: dict[str, int], build: Build, sampled: list[list[int]]
) -> None:
    engine = build(variant, 3, **fields, **tree)
    assert generate(engine, sampled_requests()) == sampled
    assert bool(engine.counters.preemptions) == ("kv_cache_tokens" in fields)
    assert engine.counters.accepted_tokens > 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_no_coin_is_thrown_twice(rule: str, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a coin has decided must not decide again; under block verification that goes for the noise of drafts as well, because
    how many tokens a step keeps depends on all of its draft."""
    used: list[tuple[object, ...]] = []

    def spy(module: str, function: str) -> None:
        original = getattr(importlib.import_module(module), function)

        def spied(*args: object, **kwargs: object) -> object:
            key = args[:3] if function == "uniform" else args[1:4]
            used.append((function, *key))
            return original(*args, **kwargs)

        monkeypatch.setattr(f"{module}.{function}", spied)

    spy("backends.reference.engine", "uniform")
    spy("backends.reference.engine", "race")
    if rule == "block":
        spy("backends.reference.drafters.choice", "log_exponential")
    for variant, tree in (("draft_model", {}), ("p_eagle", {}), ("eagle3", TREE)):
        used.clear()
        engine = build(variant, 3, sampling=rule, max_num_seqs=2, **tree)
        generate(engine, [request(p, 40, temperature=1.0, seed=i, ignore_eos=True) for i, p in enumerate(PROMPTS[:2])])
        assert len(used) > 60
        assert len(set(used)) == len(used)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_text_over_several_steps_has_the_target_s_law(rule: str, build: Build) -> None:
    """1,000 seeds, five tokens of two choices each: 32 texts, whose frequencies are held against the product of the target's
    probabilities. Rules are exact within a step (test_verify); this is about what steps have in common."""
    sampling = Sampling(temperature=1.0, top_k=2)
    engine = build("draft_model", 3, sampling=rule)
    prompt = PROMPTS[5]
    law = {(): 1.0}
    for _ in range(5):
        longer: dict[tuple[int, ...], float] = {}
        for text, weight in law.items():
            (hidden, _), _ = target_pass(engine, [*prompt, *text])
            p = probabilities(engine.model.logits(hidden[-1:])[0], sampling)
            longer |= {(*text, int(token)): weight * float(p[token]) for token in p.nonzero().flatten()}
        law = longer
    count = 1000
    made = generate(engine, [request(prompt, 5, temperature=1.0, top_k=2, seed=seed, ignore_eos=True) for seed in range(count)])
    seen = Counter(tuple(ids) for ids in made)
    assert set(seen) <= set(law)
    assert chisquare([seen[text] for text in law], [count * weight for weight in law.values()]).pvalue > 1e-3
    assert engine.counters.decode_steps < 4 * count * 0.9


@pytest.mark.parametrize(("variant", "tree"), HEADS, ids=name)
def test_rejection_is_reproducible_whatever_is_batched(variant: str, tree: dict[str, int], build: Build) -> None:
    first, again = (
        generate(build(variant, 3, sampling="rejection", max_num_seqs=n, **tree), sampled_requests()) for n in (16, 3)
    )
    assert first == again
    assert [len(ids) for ids in first] == [24] * 16


@pytest.mark.parametrize("variant", ["eagle3", "p_eagle", "medusa", "mtp"])
def test_a_quantized_head_drafts_for_the_same_text(variant: str, build: Build, greedy: list[list[int]]) -> None:
    engine = build(variant, 3, draft_quantization="int8", max_num_seqs=8)
    assert generate(engine, [request(prompt) for prompt in PROMPTS[:8]]) == greedy[:8]
    assert engine.counters.accepted_tokens > 0


def test_medusa_heads_may_share_one_lm_head(tmp_path: Path, build: Build, greedy: list[list[int]]) -> None:
    """vLLM's layout; at int8 as well, whose kernel takes matrices only."""
    torch.manual_seed(2)
    tensors = {f"blocks.{h}.layers.0.weight": published.rand(64, 64) for h in range(3)}
    tensors["lm_head.weight"] = published.rand(published.VOCAB, 64)
    published.write(tmp_path, tensors, {"num_heads": 3, "num_hidden_layers": 1, "original_lm_head": True})
    for quantization in ("none", "int8"):
        engine = build("medusa", 3, draft=str(tmp_path), draft_quantization=quantization)
        assert generate(engine, [request(prompt) for prompt in PROMPTS[:4]]) == greedy[:4]


@pytest.mark.parametrize(
    ("variant", "k", "fields", "message"),
    [
        ("medusa", 7, {}, "K = 7, and .* has 6 Medusa heads"),
        ("p_eagle", 3, TREE, "p_eagle drafts chains"),
        ("eagle3", 3, {"topk": 3}, "needs num_draft_tokens from 4 to 22"),
        ("eagle3", 3, {"topk": 0}, "topk 0"),
        ("eagle3", 3, {"num_draft_tokens": 9}, r"a chain has K \+ 1 = 4"),
        ("mtp", 2, {"draft": "/nowhere"}, "draft directory /nowhere does not exist"),
    ],
)
def test_drafts_that_cannot_be_are_refused(variant: str, k: int, fields: dict[str, Any], message: str, build: Build) -> None:
    with pytest.raises(ConfigError, match=message):
        build(variant, k, **fields)
