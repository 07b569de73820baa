"""The engine on a tiny 8-layer model in float32: exact text whatever is drafted and batched, and counters that add up."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import EOS, PROMPTS, Build, generate, output, request, sampled_requests, save_tokenizer
from transformers import AutoModelForCausalLM

from backends.reference.batch import Piece, build_batch
from backends.reference.drafters.draft_model import DraftModel
from backends.reference.engine import Engine
from backends.reference.kv_cache import KVCache
from backends.reference.model import Decoder
from backends.reference.sequence import Sequence
from backends.reference.verify import Draft
from backends.serving import GenerationRequest, RequestError, TokenLogprob
from backends.types import ConfigError


@pytest.mark.parametrize("fields", [{"max_num_batched_tokens": 24}, {"chunked_prefill": False}], ids=str)
@pytest.mark.parametrize(("variant", "k"), [("off", 0), ("ngram", 4), ("draft_model", 3)])
def test_how_prompts_are_cut_does_not_change_the_text(
    variant: str, k: int, fields: dict[str, Any], build: Build, greedy: list[list[int]]
) -> None:
    assert generate(build(variant, k, **fields), [request(prompt) for prompt in PROMPTS]) == greedy


class AnyTree:
    """Drafts a random tree that contains the right continuation somewhere, or not."""

    capture = ()

    def __init__(self, texts: dict[int, list[int]]) -> None:
        self._texts = texts
        self._rng = random.Random(0)

    def propose(self, work: list[tuple[Sequence, int]]) -> list[Draft]:
        return [self._tree(sequence, limit) for sequence, limit in work]

    def _tree(self, sequence: Sequence, limit: int) -> Draft:
        rest = self._texts[sequence.id][sequence.output_tokens :]
        tokens, parents, depth = [], [], [0]
        for node in range(1, limit + 1):
            parent = self._rng.randrange(node)
            depth.append(depth[parent] + 1)
            right = depth[node] - 1 < len(rest) and self._rng.random() < 0.8
            tokens.append(rest[depth[node] - 1] if right else self._rng.randrange(256))
            parents.append(parent)
        return Draft(tuple(tokens), tuple(parents))

    def observe(self, *_: Any) -> None:
        pass

    def adopt(self, sequence: Sequence, slot: int, rows: int) -> int:
        return rows

    def forget(self, sequence: Sequence) -> None:
        pass


def test_text_is_the_same_with_trees(build: Build, greedy: list[list[int]], sampled: list[list[int]]) -> None:
    for expected, requests in ((greedy, [request(p) for p in PROMPTS]), (sampled, sampled_requests())):
        engine = build("ngram", 6)
        engine.drafter = AnyTree(dict(enumerate(expected)))
        assert generate(engine, requests) == expected
        assert engine.counters.accepted_tokens > engine.counters.drafted_steps / 2


def test_rejection_mode_samples_legal_text_and_is_reproducible(build: Build) -> None:
    requests = sampled_requests()
    first, again = (generate(build("draft_model", 3, sampling="rejection", max_num_seqs=n), requests) for n in (16, 3))
    assert first == again
    assert [len(ids) for ids in first] == [24] * 16


@pytest.mark.parametrize("sampling", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_equal_to_the_target_is_accepted_whole(sampling: str, temperature: float, build: Build, tiny_dir: Path) -> None:
    engine = build("draft_model", 3, draft=str(tiny_dir), sampling=sampling)
    generate(engine, [request(p, 25, temperature=temperature, seed=i, ignore_eos=True) for i, p in enumerate(PROMPTS)])
    c = engine.counters
    assert (c.decode_steps, c.drafted_steps, c.draft_tokens, c.accepted_tokens) == (16 * 6, 16 * 6, 16 * 18, 16 * 18)
    assert c.accepted_per_position == [96, 96, 96]


@pytest.mark.parametrize(("variant", "k"), [("off", 0), ("ngram", 4), ("draft_model", 3)])
def test_counters_equal_what_was_emitted(variant: str, k: int, build: Build) -> None:
    engine = build(variant, k)
    sequences = [engine.add(request(p, 5 + 3 * i)) for i, p in enumerate(PROMPTS)]
    decode_steps = engine_steps = 0
    while engine.has_work:
        before = {s.id: s.output_tokens for s in sequences}
        outputs = engine.step()
        decoded = [o for o in outputs if before[o.sequence.id] > 0]
        decode_steps += len(decoded)
        engine_steps += bool(decoded)
        assert all(
            s.output_tokens - before[s.id] == sum(len(o.token_ids) for o in outputs if o.sequence is s) for s in sequences
        )
    c = engine.counters
    emitted = sum(len(output(s)) for s in sequences)
    assert (c.generated_tokens, c.first_tokens, c.decode_steps, c.engine_steps) == (emitted, 16, decode_steps, engine_steps)
    assert c.prompt_tokens == sum(map(len, PROMPTS))
    assert c.accepted_tokens == sum(c.accepted_per_position)
    assert c.accepted_per_position == sorted(c.accepted_per_position, reverse=True)
    if variant == "off":
        assert (emitted - 16) / c.decode_steps == 1.0
        assert c.drafted_steps == c.draft_tokens == 0
    else:
        assert (emitted - 16) / c.decode_steps > 1.0


def test_suffix_finds_what_ngram_finds_and_drafts_no_longer_than_its_match(build: Build) -> None:
    """The text is a loop of six tokens twice over, and then once more: three tokens match, so three are drafted."""
    loop = [1, 2, 3, 4, 5, 6]
    engine = build("suffix", 6)
    sequence = engine.add(request([*loop, *loop, 9, *loop[:3]]))
    assert engine.drafter.propose([(sequence, 6)])[0].tokens == (4, 5, 6)
    assert engine.drafter.propose([(sequence, 2)])[0].tokens == (4, 5)


def test_k_follows_the_batch_size(build: Build, greedy: list[list[int]]) -> None:
    """K = 4 alone, 2 for up to five sequences, 0 above; the text stays the same."""
    schedule = ((1, 1, 4), (2, 5, 2), (6, 16, 0))
    engine = build("draft_model", 4, k_schedule=schedule)
    seen: dict[int, set[int]] = {}
    propose = engine.drafter.propose

    def spy(work: list[tuple[Sequence, int]]) -> list[Draft]:
        drafts = propose(work)
        seen.setdefault(len(work), set()).update(
            len(draft.tokens) for (s, _), draft in zip(work, drafts, strict=True) if s.draft_room >= 4
        )
        return drafts

    engine.drafter.propose = spy  # type: ignore[method-assign]
    sequences = [engine.add(request(p, 24 - i, ignore_eos=True)) for i, p in enumerate(PROMPTS)]
    while engine.has_work:
        engine.step()
    assert seen.pop(0) == set()
    assert set(seen) > {1, 16}
    for batch, drafted in seen.items():
        assert drafted <= {4 if batch == 1 else 2 if batch <= 5 else 0}
    for sequence, text in zip(sequences, greedy, strict=True):
        shared = min(len(text), sequence.output_tokens)
        assert output(sequence)[:shared] == text[:shared]


@pytest.mark.parametrize(("variant", "k"), [("ngram", 3), ("draft_model", 3)])
def test_forced_acceptance_has_the_rates_asked_for(variant: str, k: int, build: Build) -> None:
    """2 × 10 long requests, and every step drafts K: the rates are those of some 800 coins."""
    engine = build(variant, k, forced_acceptance=(0.8, 0.5, 0.1))
    generate(engine, [request(p, 200, seed=i, ignore_eos=True) for i, p in enumerate(PROMPTS[:10])])
    c = engine.counters
    full = c.decode_steps - 10 * k  # the last steps of a request have room for less
    assert c.draft_tokens >= full * k
    for count, rate in zip(c.accepted_per_position, (0.8, 0.5, 0.1), strict=True):
        assert abs(count / c.decode_steps - rate) < 4 * (rate * (1 - rate) / c.decode_steps) ** 0.5 + 10 / c.decode_steps


def test_a_step_log_adds_up(build: Build, tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    engine = build("draft_model", 3, step_log=log)
    engine.warm_up()
    generate(engine, [request(p) for p in PROMPTS])
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    c = engine.counters
    for name, total in (
        ("batch", c.decode_steps),
        ("drafted", c.draft_tokens),
        ("accepted", c.accepted_tokens),
        ("emitted", c.generated_tokens),
        ("prompt", c.prompt_tokens),
    ):
        assert sum(step[name] for step in steps) == total
    assert sum(step["batch"] > 0 for step in steps) == c.engine_steps
    for step in steps:
        parts = [step[f"{part}_s"] for part in ("draft", "verify", "sample", "host")]
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(step["step_s"], abs=1e-6)


def _ends_inside_a_draft(engine: Engine, prompt: list[int], **fields: Any) -> tuple[Sequence, int]:
    """Run one request; also how many tokens its last step emitted."""
    sequence = engine.add(request(prompt, **fields))
    last = 0
    while engine.has_work:
        last = len(engine.step()[-1].token_ids)
    return sequence, last


def test_eos_inside_a_draft_ends_the_text_there(build: Build, tiny_dir: Path, greedy: list[list[int]]) -> None:
    """The third token of the greedy text is declared to be EOS; a perfect draft of 6 runs past it."""
    text = greedy[1]
    engine = build("draft_model", 6, draft=str(tiny_dir))
    sequence = engine.add(request(PROMPTS[1]))
    sequence.end_ids = frozenset({text[3]})
    while engine.has_work:
        engine.step()
    cut = text.index(text[3]) + 1
    assert output(sequence) == text[:cut]
    assert sequence.finish_reason == "stop"
    c = engine.counters
    assert c.generated_tokens == cut
    assert c.accepted_tokens == cut - 1  # all but the first came from the draft; what lay past EOS is not counted


def test_max_tokens_bounds_drafts(build: Build, tiny_dir: Path, greedy: list[list[int]]) -> None:
    """5 tokens: the first from the prompt, then at most 3 drafted and the target's own."""
    engine = build("draft_model", 6, draft=str(tiny_dir))
    sequence, last = _ends_inside_a_draft(engine, PROMPTS[1], max_tokens=5)
    assert output(sequence) == greedy[1][:5]
    assert (sequence.finish_reason, last) == ("length", 4)
    assert (engine.counters.draft_tokens, engine.counters.accepted_tokens, engine.counters.decode_steps) == (3, 3, 1)


def test_a_stop_string_inside_a_draft_ends_the_text_before_it(build: Build, tiny_dir: Path) -> None:
    plain = build()
    whole = plain.tokenizer.decode(generate(plain, [request(PROMPTS[3])])[0])
    stop = next(whole[i : i + 2] for i in range(2, len(whole)) if whole[i : i + 2].isascii() and len(whole[i : i + 2]) == 2)
    for variant, k in (("off", 0), ("draft_model", 6)):
        engine = build(variant, k, **({"draft": str(tiny_dir)} if k else {}))
        sequence = engine.add(request(PROMPTS[3], stop=(stop,)))
        text = ""
        while engine.has_work:
            text += "".join(o.text for o in engine.step())
        assert text == whole[: whole.index(stop)]
        assert sequence.finish_reason == "stop"
        assert engine.tokenizer.decode(output(sequence)).endswith(stop)
        assert engine.counters.generated_tokens == len(output(sequence))


def test_ignore_eos_runs_on(build: Build) -> None:
    engine = build()
    assert engine.model.config.eos_ids == {EOS}
    sequences = [engine.add(request(p, 40, ignore_eos=True)) for p in PROMPTS]
    while engine.has_work:
        engine.step()
    assert {len(output(s)) for s in sequences} == {40}


@pytest.mark.parametrize(("variant", "k"), [("off", 0), ("ngram", 3), ("draft_model", 3)])
def test_preemption_does_not_change_the_text(variant: str, k: int, build: Build, sampled: list[list[int]]) -> None:
    engine = build(variant, k, max_model_len=120, kv_cache_tokens=200)
    assert generate(engine, sampled_requests()) == sampled
    c = engine.counters
    assert c.preemptions > 0
    assert c.prompt_tokens == sum(map(len, PROMPTS))  # recomputation is not a prompt
    assert c.generated_tokens == 16 * 24
    if variant == "off":
        assert c.decode_steps == 16 * 23


def _recomputed(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """Keys and values of `tokens` from scratch: [layers, n, 2, kv_heads, head_dim]."""
    cache = KVCache(model.config, slots=1, rows=len(tokens), dtype=model.dtype, device=model.device)
    batch = build_batch([Piece(0, 0, tokens)], slot_rows=len(tokens), dtype=model.dtype, device=model.device)
    model.forward(batch, cache)
    return torch.stack([layer[0] for layer in cache._layers])


@pytest.mark.parametrize(("variant", "k"), [("ngram", 4), ("draft_model", 4)])
def test_after_every_step_the_caches_equal_a_recomputation(variant: str, k: int, build: Build) -> None:
    engine = build(variant, k, max_num_seqs=4, max_num_batched_tokens=40)
    for i, prompt in enumerate(PROMPTS[:8]):
        engine.add(request(prompt, 12, temperature=0.8 * (i % 2), seed=i))
    while engine.has_work:
        engine.step()
        for s in engine.scheduler.running:
            kept = torch.stack([layer[s.slot, : s.computed] for layer in engine.cache._layers])
            torch.testing.assert_close(kept, _recomputed(engine.model, s.tokens[: s.computed]), atol=1e-4, rtol=1e-4)
            if isinstance(engine.drafter, DraftModel) and (known := engine.drafter._catch_up(s).base):
                kept = torch.stack([layer[s.slot, :known] for layer in engine.drafter._cache._layers])
                torch.testing.assert_close(kept, _recomputed(engine.drafter._model, s.tokens[:known]), atol=1e-4, rtol=1e-4)


def test_cancelling_frees_the_slot(build: Build, greedy: list[list[int]]) -> None:
    engine = build("draft_model", 3, max_num_seqs=1)
    first, second = engine.add(request(PROMPTS[0])), engine.add(request(PROMPTS[1]))
    waiting = engine.add(request(PROMPTS[2]))
    engine.step()
    engine.cancel(first)
    engine.cancel(waiting)
    while engine.has_work:
        engine.step()
    assert output(second) == greedy[1]
    assert first.finish_reason == waiting.finish_reason == "cancelled"


def test_a_draft_model_with_another_tokenizer_is_refused(build: Build, tmp_path: Path, draft_dir: Path) -> None:
    for file in draft_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_tokenizer(tmp_path, eos="<end>")
    with pytest.raises(ConfigError, match="another tokenizer"):
        build("draft_model", 2, draft=str(tmp_path))
    with pytest.raises(ConfigError, match="does not exist"):
        build("draft_model", 2, draft="/nowhere")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"variant": "off", "k": 2}, "off has K = 0"),
        ({"variant": "ngram", "k": 0}, "every other variant K >= 1"),
        ({"variant": "eagle9", "k": 2}, "unknown variant 'eagle9'"),
        ({"quantization": "fp3"}, "unknown quantization 'fp3'"),
        ({"kv_cache_dtype": "int4"}, "unknown kv_cache_dtype 'int4': choose from auto, fp8, int8"),
        ({"dtype": "int7"}, "dtype 'int7'"),
        ({"sampling": "typical"}, "coupled, rejection, block"),
        ({"max_num_seqs": 0}, "at least 1"),
        ({"max_num_batched_tokens": 16}, "leaves prompts no room"),
        ({"max_model_len": 100_000}, "exceeds the model's context of 512"),
        ({"kv_cache_tokens": 10}, "cannot hold one sequence"),
        ({"variant": "ngram", "k": 2, "draft": "x"}, "takes no --draft"),
        ({"variant": "ngram", "k": 2, "k_schedule": ((1, 4, 3),)}, "K must lie between 0 and the configuration's K = 2"),
        ({"variant": "ngram", "k": 2, "k_schedule": ((2, 4, 1),)}, "start at batch size 1"),
        ({"variant": "ngram", "k": 2, "forced_acceptance": (0.5,)}, "2 rates of 0 to 1"),
        ({"variant": "ngram", "k": 2, "forced_acceptance": (0.5, 0.6)}, "none above the one before"),
        ({"variant": "ngram", "k": 2, "step_log": Path("/nowhere/log")}, "--step-log /nowhere/log cannot be written"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, Any], message: str, build: Build) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**fields)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (request([1] * 500, 20), "max_tokens"),
        (request([], 20), "prompt"),
        (request([1, 999], 20), "prompt"),
        (request([1], 0), "max_tokens"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(bad: GenerationRequest, field: str, build: Build) -> None:
    engine = build()
    with pytest.raises(RequestError) as refused:
        engine.add(bad)
    assert refused.value.field == field
    assert not engine.has_work


def told(engine: Engine, prompts: list[list[int]]) -> list[list[TokenLogprob]]:
    """Log-probabilities of each request's tokens, two alternatives each."""
    sequences = [engine.add(request(prompt, logprobs=2)) for prompt in prompts]
    found: dict[int, list[TokenLogprob]] = {sequence.id: [] for sequence in sequences}
    while engine.has_work:
        for step in engine.step():
            assert len(step.logprobs) == len(step.token_ids)
            found[step.sequence.id] += step.logprobs
    return [found[sequence.id] for sequence in sequences]


@pytest.mark.parametrize(("variant", "k"), [("off", 0), ("ngram", 4), ("draft_model", 3)])
def test_log_probabilities_are_the_models_own_whatever_is_drafted(
    variant: str, k: int, build: Build, tiny_dir: Path, greedy: list[list[int]]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    for prompt, text, entries in zip(PROMPTS, greedy, told(build(variant, k), PROMPTS), strict=True):
        with torch.no_grad():
            rows = model(torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert [entry.top[0][0] for entry in entries] == text
        assert [entry.logprob for entry in entries] == pytest.approx(
            [float(r[t]) for r, t in zip(rows, text, strict=True)], abs=1e-4
        )
        assert [entry.top[1][1] for entry in entries] == pytest.approx(rows.topk(2).values[:, 1].tolist(), abs=1e-4)


def test_no_log_probabilities_are_worked_out_where_nobody_asks(build: Build) -> None:
    engine = build("off", 0)
    engine.add(request(PROMPTS[0]))
    assert {step.logprobs for _ in iter(lambda: engine.has_work, False) for step in engine.step()} == {()}
