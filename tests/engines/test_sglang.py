"""The real SGLang server on a CPU, through the adapter, the supervisor and the counters, one server for each variant.

Everything is in float32, so that greedy text must be identical with and without speculation. How many verification steps a
variant may take is derived a second time: for heads by the reference engine of this repository, for a draft model by plain greedy
decoding. The heads' target and EAGLE head are small and made for partial acceptance; EAGLE-3 is the head that comes with the
demo model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import eagle, target
from sglang_server import ask, counters, running
from transformers import AutoModelForCausalLM, AutoTokenizer

from backends.reference.demo_heads import demo_head_dir
from backends.reference.demo_model import demo_model_dir
from backends.reference.engine import Engine
from backends.reference.options import EngineOptions
from backends.serving import GenerationRequest
from harness import losslessness
from harness.answers import Output, ask_all
from workloads.types import Request

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]  # two server starts on a busy machine

PROMPTS = ("one two three one two three one two", "Paris is the capital of", "def f(n):\n    return")
TOKENS = 24
REQUESTS = [Request(index=i, arrival_s=0.0, prompt=f"{i} times {prompt}") for i, prompt in enumerate(PROMPTS * 4)]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "small": target(folder / "small", demo_model_dir(), embedding=40.0),
        "small eagle": eagle(folder / "eagle"),
        "demo": demo_model_dir(),
        "demo eagle3": demo_head_dir("eagle3"),
    }


@dataclass(frozen=True)
class Off:
    """What a server without speculation answers."""

    ids: list[tuple[int, ...]]
    audited: dict[int, Output]
    control: dict[int, Output]  # one request at a time


@pytest.fixture(scope="session")
def off(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Off]:
    @cache
    def of(name: str) -> Off:
        with running(models[name], tmp_path_factory.mktemp("off")) as endpoint:
            assert endpoint.warnings == ()
            assert endpoint.version == "0.5.23"
            assert endpoint.kv_cache_tokens == 8192
            ids = [ask(endpoint, prompt, TOKENS).ids for prompt in PROMPTS]
            if name == "demo":
                return Off(ids, {}, {})
            return Off(ids, ask_all(endpoint, REQUESTS, at_once=4, gaps=True), ask_all(endpoint, REQUESTS, at_once=1))

    return of


def reference_steps(target: Path, fields: dict[str, Any]) -> list[int]:
    """Decode steps of each prompt on the reference engine of this repository, which shares no code with SGLang.

    It is asked for more tokens than are counted, since it drafts less deep where an answer is about to end.
    """
    tokenizer, steps = AutoTokenizer.from_pretrained(target), []
    for prompt in PROMPTS:
        engine = Engine(EngineOptions(target, dtype="float32", max_num_seqs=1, max_model_len=256, **fields))
        ids = tuple(tokenizer(prompt)["input_ids"])
        engine.add(GenerationRequest(prompt_ids=ids, max_tokens=2 * TOKENS, temperature=0.0, ignore_eos=True))
        while (engine.counters.generated_tokens or 0) < TOKENS:
            engine.step()
        steps.append(engine.counters.decode_steps)
    return steps


@torch.no_grad()
def own_draft_steps(target: Path, k: int, ids: list[tuple[int, ...]]) -> list[int]:
    """Verification steps when a target drafts for itself as SGLang lets it: without ever seeing the prompt's first token.

    SGLang feeds every drafter the tokens shifted by one place, as EAGLE needs them (`_draft_extend_for_prefill`), so a draft
    model's context begins with the second token, and the target itself is not always of its own opinion.
    """
    tokenizer, model = AutoTokenizer.from_pretrained(target), AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    steps = []
    for prompt, answer in zip(PROMPTS, ids, strict=True):
        context, done, count = tokenizer(prompt)["input_ids"][1:], 1, 0
        while done < len(answer):
            draft = torch.tensor([[*context, *answer[:done]]])
            for _ in range(k):
                draft = torch.cat([draft, model(draft).logits[:, -1:].argmax(-1)], dim=1)
            agreed = draft[0, -k:].tolist()
            done += 1 + next((i for i in range(k) if answer[done + i : done + i + 1] != (agreed[i],)), k)
            count += 1
        steps.append(count)
    return steps


CASES: dict[str, dict[str, Any]] = {
    "ngram": {"model": "small", "variant": "ngram", "k": 4},
    "ngram tree": {"model": "small", "variant": "ngram", "k": 7, "topk": 4},
    "draft_model": {"model": "small", "variant": "draft_model", "k": 3, "draft": "small"},
    "draft_model tree": {
        **{"model": "small", "variant": "draft_model", "k": 3, "draft": "small"},
        **{"topk": 2, "num_draft_tokens": 8},
    },
    "eagle2": {"model": "small", "variant": "eagle2", "k": 3, "draft": "small eagle"},
    "eagle2 tree": {
        **{"model": "small", "variant": "eagle2", "k": 3, "draft": "small eagle"},
        **{"topk": 4, "num_draft_tokens": 12},
    },
    "eagle3": {"model": "demo", "variant": "eagle3", "k": 3, "draft": "demo eagle3"},
    "eagle3 tree": {
        **{"model": "demo", "variant": "eagle3", "k": 3, "draft": "demo eagle3"},
        **{"topk": 4, "num_draft_tokens": 12},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_variant_runs_is_lossless_and_its_tau_is_the_steps_counted_by_hand(
    case: str, models: dict[str, Path], off: Callable[[str], Off], tmp_path: Path
) -> None:
    fields = dict(CASES[case])
    name = fields.pop("model")
    if "draft" in fields:
        fields["draft"] = str(models[fields["draft"]])
    with running(models[name], tmp_path, **fields) as endpoint:
        assert endpoint.warnings == ()
        before = counters(endpoint)
        # An n-gram drafter finds little in so short a text, and all of it when it has answered the same prompt before.
        rounds = 2 if fields["variant"] == "ngram" else 1
        answers = [ask(endpoint, prompt, TOKENS) for prompt in PROMPTS * rounds]
        window = counters(endpoint) - before
    steps = [answer.verify_steps or 0 for answer in answers]
    by_hand = sum(len(answer.ids) - 1 for answer in answers) / sum(steps)
    print(json.dumps({"case": case, "tau": by_hand, "verify_steps": steps}))
    assert [answer.ids for answer in answers] == off(name).ids * rounds
    assert window.decode_steps == sum(steps)
    assert window.tau == pytest.approx(by_hand)
    assert 1.0 <= by_hand <= fields["k"] + 1
    if fields["variant"] == "ngram":
        assert sum(steps[len(PROMPTS) :]) < sum(steps[: len(PROMPTS)]) / 2
    elif case == "draft_model":
        assert steps == own_draft_steps(models[name], fields["k"], [answer.ids for answer in answers])
        assert by_hand > 3  # of at most 4
    elif fields["variant"] in ("eagle2", "eagle3"):
        assert steps == reference_steps(models[name], fields)


def test_forced_acceptance_is_measured_reported_and_loses_the_text(
    models: dict[str, Path], off: Callable[[str], Off], tmp_path: Path
) -> None:
    forced, draft = {"SGLANG_SIMULATE_ACC_LEN": "2.5"}, str(models["small eagle"])
    with running(models["small"], tmp_path, env=forced, variant="eagle2", k=3, draft=draft) as endpoint:
        assert any("acceptance is forced to 2.5" in warning for warning in endpoint.warnings)
        before = counters(endpoint)
        ask_all(endpoint, REQUESTS, at_once=4, max_tokens=240)
        window = counters(endpoint) - before
        answers = ask_all(endpoint, REQUESTS, at_once=4)
    print(json.dumps({"case": "forced 2.5", "tau": window.tau}))
    assert window.tau == pytest.approx(2.5, rel=0.05)
    plain = off("small")
    entry = losslessness.entry(answers, plain.audited, plain.control, shapes=(4, 1))
    print(json.dumps(entry))
    assert entry["verdict"] == "differs"
    same = losslessness.entry(plain.audited, plain.audited, plain.control, shapes=(4, 1))
    assert same["verdict"] == "identical"
