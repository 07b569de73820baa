"""The real SGLang server on a CPU, through the adapter, the supervisor and the counters, one server for each variant.

Target and heads are small with random weights in float32, so that greedy text must be identical with and without speculation.
The target drafts for itself as draft model, which gives real acceptance; drafts of random heads are nearly all rejected, which
shows the plumbing and the rejection path.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import HIDDEN, Weights, _save, eagle3, ones, target
from sglang_server import CPU_BASE_ARGS, ENVIRONMENT, sglang_python

from backends import sglang
from backends.counters import parse_metrics
from backends.http_client import call
from backends.process import Server, free_port
from backends.reference.demo_model import demo_model_dir
from backends.sglang_server_info import request_counts
from backends.types import Endpoint, ServingConfig, SpecCounters

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

PROMPTS = ("one two three one two three one two", "The capital of France is", "def f(n):\n    return")
TOKENS = 24


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    target(folder / "target", demo_model_dir())
    eagle3(folder / "eagle3")
    eagle(folder / "eagle")
    return folder


def eagle(folder: Path) -> Path:
    """EAGLE-1/2: `fc` over embedding and hidden state, one layer; embedding and output matrix are the target's."""
    weights = Weights(3)
    identity = np.concatenate([np.zeros((HIDDEN, HIDDEN)), np.eye(HIDDEN)], axis=1).astype(np.float32)
    tensors = weights.layer("layers.0") | ones("layers.0.input_layernorm.weight") | {"fc.weight": identity}
    config = {"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama", "num_hidden_layers": 1}
    return _save(folder, {**config, "tie_word_embeddings": False}, tensors)


@dataclass(frozen=True)
class Answer:
    ids: tuple[int, ...]
    counts: SpecCounters
    verify_steps: int | None


@contextmanager
def running(models: Path, folder: Path, env: dict[str, str] | None = None, **changes: Any) -> Iterator[Endpoint]:
    extra = {"dtype": "float32", "random_seed": 0, "env": {**ENVIRONMENT, **(env or {})}}
    fields = {"backend": "sglang", "model": str(models / "target"), "max_num_seqs": 4, "extra": extra}
    settings, port = ServingConfig(**{**fields, **changes}), free_port()
    launch = sglang.launch(settings, port=port, command=(sglang_python(),), base_args=CPU_BASE_ARGS)
    with Server.start(launch, port=port, folder=folder, backend="sglang") as server:
        yield sglang.read_back(server.endpoint, settings, server.log())


def ask(endpoint: Endpoint, prompt: str) -> Answer:
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}}
    reply = call(f"{endpoint.base_url}/generate", body, timeout_s=300)
    assert reply is not None
    assert reply.status == 200, reply.body
    answer = reply.json()
    return Answer(tuple(answer["output_ids"]), request_counts(answer["meta_info"]), answer["meta_info"].get("spec_verify_ct"))


def counters(endpoint: Endpoint) -> SpecCounters:
    page = call(f"{endpoint.base_url}/metrics")
    assert page is not None
    return parse_metrics("sglang", page.body)[0]


@pytest.fixture(scope="session")
def off_ids(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    with running(models, tmp_path_factory.mktemp("off")) as endpoint:
        assert endpoint.warnings == ()
        assert endpoint.version == "0.5.23"
        assert endpoint.kv_cache_tokens == 8192
        return [ask(endpoint, prompt).ids for prompt in PROMPTS]


CASES: dict[str, dict[str, Any]] = {
    "ngram": {"variant": "ngram", "k": 4},
    "ngram tree": {"variant": "ngram", "k": 7, "topk": 4},
    "draft_model": {"variant": "draft_model", "k": 3, "draft": "target"},
    "draft_model tree": {"variant": "draft_model", "k": 3, "topk": 2, "num_draft_tokens": 8, "draft": "target"},
    "eagle2": {"variant": "eagle2", "k": 3, "draft": "eagle"},
    "eagle2 tree": {"variant": "eagle2", "k": 3, "topk": 4, "num_draft_tokens": 12, "draft": "eagle"},
    "eagle3": {"variant": "eagle3", "k": 3, "draft": "eagle3"},
    "eagle3 tree": {"variant": "eagle3", "k": 3, "topk": 4, "num_draft_tokens": 12, "draft": "eagle3"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_variant_runs_is_lossless_and_its_tau_is_the_steps_counted_by_hand(
    case: str, models: Path, off_ids: list[tuple[int, ...]], tmp_path: Path
) -> None:
    fields = dict(CASES[case])
    if "draft" in fields:
        fields["draft"] = str(models / fields["draft"])
    with running(models, tmp_path, **fields) as endpoint:
        assert endpoint.warnings == ()
        before = counters(endpoint)
        answers = [ask(endpoint, prompt) for prompt in PROMPTS]
        window = counters(endpoint) - before
    assert [answer.ids for answer in answers] == off_ids
    steps = sum(answer.verify_steps or 0 for answer in answers)
    by_hand = sum(len(answer.ids) - 1 for answer in answers) / steps
    print(
        json.dumps(
            {"case": case, "tau": by_hand, "verify_steps": steps, "accepted": [a.counts.accepted_tokens for a in answers]}
        )
    )
    assert window.decode_steps == steps
    assert window.tau == pytest.approx(by_hand)
    assert 1.0 <= by_hand <= fields["k"] + 1
    if fields["variant"] == "draft_model":
        assert by_hand > 3  # the target drafts what it will say itself


def test_forced_acceptance_is_measured_reported_and_loses_the_text(
    models: Path, off_ids: list[tuple[int, ...]], tmp_path: Path
) -> None:
    forced = {"SGLANG_SIMULATE_ACC_LEN": "2.5"}
    with running(models, tmp_path, env=forced, variant="eagle3", k=3, draft=str(models / "eagle3")) as endpoint:
        assert any("acceptance is forced to 2.5" in warning for warning in endpoint.warnings)
        answers = [ask(endpoint, prompt) for prompt in PROMPTS * 3]
    tokens = sum(len(answer.ids) - 1 for answer in answers)
    tau = tokens / sum(answer.verify_steps or 0 for answer in answers)
    print(json.dumps({"case": "forced 2.5", "tau": tau}))
    assert tau == pytest.approx(2.5, rel=0.1)  # a request's last step is cut short
    assert [answer.ids for answer in answers[: len(PROMPTS)]] != off_ids
