"""What heads draft, and the caches behind it, against a recomputation from scratch on the tiny model in float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import HEADS, PROMPTS, Build, generate, head_from_scratch, name, request, save, shape, target_pass
from torch import Tensor
from transformers import Qwen2Config

from backends.reference.drafters.autoregressive import Autoregressive
from backends.reference.drafters.head_cache import PATIENCE, HeadCache
from backends.reference.drafters.p_eagle import Parallel
from backends.reference.drafters.tree import fixed_tree
from backends.reference.engine import Engine
from backends.reference.heads.block import causal
from backends.reference.loader import load_model
from backends.reference.options import EngineOptions
from backends.reference.sampling import Sampling
from backends.reference.sequence import Sequence
from backends.reference.verify import Draft
from backends.types import ConfigError
from tests.backends.reference.heads import published


@pytest.mark.parametrize(("variant", "tree"), [c for c in HEADS if c[0] != "medusa"], ids=name)
@pytest.mark.parametrize("schedule", [(), ((1, 2, 3), (3, 4, 0))], ids=["K=3", "K=3 or 0"])
def test_after_every_step_the_caches_of_target_and_head_equal_a_recomputation(
    variant: str, tree: dict[str, int], schedule: tuple[tuple[int, int, int], ...], build: Build
) -> None:
    engine = build(variant, 3, max_num_seqs=4, max_num_batched_tokens=40, k_schedule=schedule, **tree)
    for i, prompt in enumerate(PROMPTS[:6]):
        engine.add(request(prompt, 10, temperature=0.8 * (i % 2), seed=i))
    drafter = engine.drafter
    assert isinstance(drafter, Autoregressive | Parallel)
    compared = 0
    while engine.has_work:
        engine.step()
        for s in engine.scheduler.running:
            _, cache = target_pass(engine, s.tokens[: s.computed])
            for kept, true in zip(engine.cache._layers, cache._layers, strict=True):
                torch.testing.assert_close(kept[s.slot, : s.computed], true[0], atol=1e-4, rtol=1e-4)
            rows = drafter.cache._taken[s.slot]
            if rows == 0:
                continue
            expected, _ = head_from_scratch(engine, s.tokens[: rows + 1])
            for layer, (k, v) in enumerate(expected):
                kept = drafter.cache._kv._layers[layer][s.slot, :rows]
                torch.testing.assert_close(kept, torch.stack((k, v), 1), atol=1e-4, rtol=1e-4)
                compared += 1
    assert compared > 10


def rollout(engine: Engine, tokens: list[int], drafted: list[int]) -> Tensor:
    """Logits [draft vocabulary] after the path `drafted`, all rows recomputed at once from the target's states and the head's own
    outputs, which feed the rows of `drafted`."""
    head = engine.drafter._head  # type: ignore[attr-defined]
    (hidden, captured), _ = target_pass(engine, tokens[:-1])
    with torch.inference_mode():
        feed = head.fuse(captured or [hidden])
        for i in range(len(drafted) + 1):
            ids = torch.tensor(tokens[1:] + drafted[:i])
            output = head(head.embed(ids), feed, torch.arange(len(ids)), causal())
            feed = torch.cat((feed, head.recycle(output[-1:])))
        return head.logits(output[-1])


def at_the_end(engine: Engine, prompt: list[int]) -> Sequence:
    """A sequence that has emitted a few tokens and is about to draft."""
    sequence = engine.add(request(prompt, 40, ignore_eos=True))
    for _ in range(3):
        engine.step()
    return sequence


@pytest.mark.parametrize("variant", ["eagle2", "eagle3", "mtp"])
def test_a_chain_is_the_head_s_own_greedy_continuation(variant: str, build: Build) -> None:
    engine = build(variant, 4)
    sequences = [at_the_end(engine, prompt) for prompt in PROMPTS[:3]]
    drafts = engine.drafter.propose([(s, 4) for s in sequences])
    for sequence, draft in zip(sequences, drafts, strict=True):
        for i, token in enumerate(draft.tokens):
            assert token == to_target(engine, rollout(engine, sequence.tokens, list(draft.tokens[:i])).argmax())


def to_target(engine: Engine, draft_id: Tensor) -> int:
    token_map = engine.drafter._head.token_map  # type: ignore[attr-defined]
    return int(draft_id if token_map is None else token_map[draft_id])


@pytest.mark.parametrize("variant", ["eagle2", "eagle3", "mtp"])
@pytest.mark.parametrize(("topk", "k", "nodes"), [(2, 2, 5), (3, 4, 12), (4, 3, 30)])
def test_a_tree_is_eagle_2_s(variant: str, topk: int, k: int, nodes: int, build: Build) -> None:
    """Against the algorithm spelled out on whole sequences, path by path: levels of `topk` nodes, each expanded by `topk` tokens;
    of all candidates the `nodes` - 1 with the best cumulative log-probability."""
    engine = build(variant, k, topk=topk, num_draft_tokens=nodes)
    sequence = at_the_end(engine, PROMPTS[1])
    (draft,) = engine.drafter.propose([(sequence, k)])
    level: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    candidates: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(k):
        grown = []
        for score, path in level:
            best = rollout(engine, sequence.tokens, list(path)).log_softmax(-1).topk(topk)
            for value, index in zip(best.values.tolist(), best.indices, strict=True):
                grown.append((score + value, (*path, to_target(engine, index))))
        candidates += grown
        level = sorted(grown, reverse=True)[:topk]
    expected = {path for _, path in sorted(candidates, reverse=True)[: nodes - 1]}
    assert set(paths_of(draft)) == expected
    assert len(draft.tokens) == len(expected)


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(draft.tokens, draft.parents or range(len(draft.tokens)), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def test_p_eagle_drafts_what_one_causal_pass_gives(build: Build) -> None:
    engine = build("p_eagle", 4)
    sequences = [at_the_end(engine, prompt) for prompt in PROMPTS[:3]]
    drafts = engine.drafter.propose([(s, 4 - i) for i, s in enumerate(sequences)])
    head = engine.drafter._head  # type: ignore[attr-defined]
    for i, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
        (_, captured), _ = target_pass(engine, sequence.tokens[:-1])
        masks = head.mask_rows(3 - i)
        with torch.inference_mode():
            embedded = torch.cat((head.embed(torch.tensor(sequence.tokens[1:])), masks[0]))
            output = head(embedded, torch.cat((head.fuse(captured), masks[1])), torch.arange(len(embedded)), causal())
            expected = head.token_map[head.logits(output[len(sequence.tokens) - 2 :]).argmax(-1)].tolist()
        assert list(draft.tokens) == expected


def test_medusa_drafts_each_head_s_best_and_a_tree_of_them(build: Build) -> None:
    chain, tree = build("medusa", 3), build("medusa", 3, topk=2, num_draft_tokens=6)
    for engine in (chain, tree):
        sequence = at_the_end(engine, PROMPTS[1])
        (hidden, _), _ = target_pass(engine, sequence.tokens[:-1])
        head = engine.drafter._head  # type: ignore[attr-defined]
        with torch.inference_mode():
            best = head.logits(head(hidden[-1])[:3]).topk(2).indices.tolist()
        (draft,) = engine.drafter.propose([(sequence, 3)])
        if engine is chain:
            assert draft.tokens == tuple(ranks[0] for ranks in best)
        else:  # the likeliest five rank paths under weights 0.6 a level and 1 / (rank + 1): 0, 1, 00, 01 or 10, 000
            (a, b), (c, d), (e, _) = best
            assert set(paths_of(draft)) == {(a,), (b,), (a, c), (a, d), (a, c, e)}


def test_a_head_that_may_not_draft_for_long_still_takes_hidden_states_in(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """K = 0 throughout: what waits stays bounded."""
    monkeypatch.setattr("backends.reference.drafters.head_cache.PATIENCE", 20)
    assert PATIENCE > 20
    engine = build("eagle3", 2, k_schedule=((1, 16, 0),))
    engine.add(request(PROMPTS[0][:10], 60, ignore_eos=True))
    cache: HeadCache = engine.drafter.cache  # type: ignore[attr-defined]
    most = 0
    while engine.has_work:
        engine.step()
        most = max([most, *(sum(len(rows) for _, rows in steps) for steps in cache._waiting.values())])
    assert 20 <= most <= 22
    assert engine.counters.draft_tokens == 0
    assert not cache._waiting


@pytest.mark.parametrize("variant", ["medusa", "eagle3", "p_eagle"])
def test_what_a_head_says_it_drew_from_is_what_it_drew_from(variant: str, build: Build) -> None:
    """Rejection: over many seeds the first draft token has the distribution that is handed to verification."""
    engine = build(variant, 1, sampling="rejection")
    sequence = at_the_end(engine, PROMPTS[2])
    head = engine.drafter._choice  # type: ignore[attr-defined]
    logits = torch.randn(1, published.VOCAB if head.token_map is None else len(head.token_map)) * 2
    counts = torch.zeros(published.VOCAB)
    law = torch.zeros(0)
    for seed in range(3000):
        tokens, (drawn,) = head.one(logits, [(Sampling(0.7, top_p=0.9, seed=seed), 5, 0)])
        assert drawn is not None
        law = drawn
        counts[tokens[0]] += 1
    assert float(law.sum()) == pytest.approx(1)
    assert sequence.output_tokens > 0
    assert float((counts / 3000 - law).abs().max()) < 0.04
    assert bool((counts[law == 0] == 0).all())


def test_mtp_modules_in_the_target_s_own_checkpoint_draft(tmp_path: Path) -> None:
    """MiMo's layout: a Qwen2 with `model.mtp_layers.0.*` beside its blocks. The text is transformers' of the same Qwen2."""
    model = save(Qwen2Config(**shape()), tmp_path)
    torch.manual_seed(3)
    prefix = "model.mtp_layers.0."
    own = published.block(prefix, bias=True, inner=128) | {f"{prefix}input_proj.weight": published.rand(64, 128)}
    own |= {f"{prefix}{part}_layernorm.weight": published.norm_weight() for part in ("token", "hidden", "final")}
    save_file(load_file(tmp_path / "model.safetensors") | own, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"does not know, such as model\.mtp_layers"):
        load_model(tmp_path)
    raw |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    engine = Engine(EngineOptions(tmp_path, variant="mtp", k=3, max_num_seqs=4))
    made = generate(engine, [request(prompt, 12, ignore_eos=True) for prompt in PROMPTS[:4]])
    for prompt, ids in zip(PROMPTS, made, strict=False):
        expected = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=12,
            min_new_tokens=12,
            do_sample=False,
            attention_mask=torch.ones(1, len(prompt)),
        )
        assert ids == expected[0, len(prompt) :].tolist()
    assert engine.counters.draft_tokens > 0
    assert any("hidden, embedding" in note for note in engine.draft_notes)


def test_fixed_trees_are_trees_of_the_likeliest_paths() -> None:
    for topk, depth, nodes in ((2, 3, 5), (4, 4, 63), (10, 2, 7)):
        paths = fixed_tree(topk, depth, nodes)
        assert len(set(paths)) == len(paths) == nodes
        assert all(path[:-1] in {(), *paths} and len(path) <= depth and max(path) < topk for path in paths)
    assert fixed_tree(2, 2, 99) == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
