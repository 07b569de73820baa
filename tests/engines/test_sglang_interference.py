"""The interference probe on the real SGLang server: long prompts go first, unless chunks are mixed with decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import eagle, target
from sglang_server import running

from backends.reference.demo_model import demo_model_dir
from harness.interference import Interference
from harness.interference_probe import probe_interference
from workloads.types import Request

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

REQUESTS = [Request(index=i, arrival_s=0.0, prompt=f"Tell me {i} things about the sea.") for i in range(4)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    target(folder / "target", demo_model_dir(), embedding=40.0)
    eagle(folder / "eagle")
    return folder


def probed(models: Path, folder: Path, flags: dict[str, Any], **changes: Any) -> Interference:
    with running(models / "target", folder, flags=flags, max_num_seqs=8, **changes) as endpoint:
        found = probe_interference(endpoint, REQUESTS)
    print(json.dumps(found.to_dict()))
    assert found.long_prompt_tokens is not None
    assert found.long_prompt_tokens > 200
    return found


def test_prefill_goes_before_decoding_and_mixed_chunks_share_the_step(models: Path, tmp_path: Path) -> None:
    chunks = {"chunked_prefill_size": 128}
    alone = probed(models, tmp_path / "alone", chunks)
    mixed = probed(models, tmp_path / "mixed", {**chunks, "enable_mixed_chunk": True})
    assert alone.order == "prefill first"
    assert mixed.pace_during_share > 2 * alone.pace_during_share


def test_prefill_goes_before_speculative_decoding_too(models: Path, tmp_path: Path) -> None:
    found = probed(models, tmp_path, {"chunked_prefill_size": 128}, variant="eagle2", k=3, draft=str(models / "eagle"))
    assert found.largest_gap_during_s > 0.8 * found.long_ttft_s  # one step before the stop may give several tokens, so no share
