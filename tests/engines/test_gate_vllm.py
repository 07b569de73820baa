"""The gate on two real vLLM servers: n-gram with K = 4 and K = 1 on answers that repeat their prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_server import config, running

from backends.reference.demo_model import demo_model_dir
from harness.gate.cli import gate
from tests.audited import POOLS

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, str]]:
    """URL by K."""
    folder = tmp_path_factory.mktemp("servers")
    model, flags = demo_model_dir(), {"dtype": "bfloat16", "max_model_len": 2048}
    one, four = (config(model, "ngram", k, flags=flags, prefix_caching=False) for k in (1, 4))
    with running(one, folder / "1") as first, running(four, folder / "4") as second:
        yield {1: first.base_url, 4: second.base_url}


def greedy_trace(folder: Path) -> Path:
    """The pool's prompts, answered greedily: sampled text of a model this small hardly repeats anything."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in (POOLS / "grounded.jsonl").read_text().splitlines()]
    path = folder / "grounded.jsonl"
    path.write_text("".join(json.dumps({**row, "temperature": 0}) + "\n" for row in rows))
    return path


def judged(baseline: str, candidate: str, out: Path) -> tuple[int, dict[str, Any]]:
    code = gate(
        baseline=baseline,
        candidate=candidate,
        trace=str(greedy_trace(out)),
        requests=6,
        batch_sizes="2",
        max_output_tokens=48,
        budget="10m",
        lossless=False,  # bfloat16 rounds differently with other shapes
        out=str(out),
    )
    return code, json.loads((out / "gate.json").read_text())


def test_fewer_draft_tokens_are_a_regression_of_acceptance(servers: dict[int, str], tmp_path: Path) -> None:
    code, found = judged(servers[4], servers[1], tmp_path)
    assert code == 3, found["reasons"]
    assert "acceptance" in found["causes"]
    (tau,) = (metric for metric in found["metrics"] if metric["key"].startswith("tau@"))
    assert tau["candidate"] < tau["baseline"]
    assert any(reason.startswith("tau fell") for reason in found["reasons"])


def test_more_draft_tokens_that_are_accepted_are_none(servers: dict[int, str], tmp_path: Path) -> None:
    code, found = judged(servers[1], servers[4], tmp_path)
    assert code != 3, found["reasons"]
    (answer,) = (answer for answer in found["answers"] if answer["question"] == "acceptance")
    assert answer["status"] == "improved", answer
