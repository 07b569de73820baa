"""The heads that are shipped for the demo model, with the real model."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path

import pytest
import torch

from backends.preflight import preflight
from backends.reference.demo_heads import SHIPPED, demo_head_dir, shipped_variants
from backends.reference.demo_model import demo_model_dir
from backends.reference.engine import Engine
from backends.reference.options import EngineOptions
from backends.serving import GenerationRequest
from backends.types import ServingConfig, WorkloadFacts

ROOT = Path(__file__).resolve().parents[3]


def test_heads_are_small_and_have_cards() -> None:
    assert "eagle3" in shipped_variants()
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*")) < 45e6
    for variant in shipped_variants():
        card = (SHIPPED / variant / "README.md").read_text()
        assert re.search(r"\| held out \| all \| \d\.\d\d \|", card), variant
        assert all(
            part in card
            for part in ("license: apache-2.0", "base_model: SmolLM2", "Seed", "Command", "## Data", "## Learning curve")
        )


@pytest.mark.parametrize("variant", shipped_variants())
def test_a_shipped_head_shortens_decoding_of_prompts_it_never_saw(variant: str) -> None:
    """Far below what its card says, since the sample is small; a head read wrongly would be near 1."""
    gc.collect()  # the head before is in a cycle, and its weights do not hurry the collector
    torch.manual_seed(0)
    lines = (ROOT / "workloads" / "pools" / "code.jsonl").read_text().splitlines()[5:14]
    options = EngineOptions(
        demo_model_dir(), variant=variant, k=2, draft=str(demo_head_dir(variant)), max_num_seqs=4, max_model_len=1024
    )
    engine = Engine(options)
    for line in lines:
        ids = tuple(engine.tokenizer.encode_chat(json.loads(line)["messages"]))
        engine.add(GenerationRequest(prompt_ids=ids, max_tokens=32, temperature=0.0))
    while engine.has_work:
        engine.step()
    counted = engine.counters
    tau = (counted.generated_tokens - counted.first_tokens) / counted.decode_steps
    assert tau > 1.1, f"{tau}, accepted at {counted.accepted_per_position} of {counted.decode_steps} steps"


@pytest.mark.parametrize("variant", shipped_variants())
def test_preflight_finds_no_fault_with_a_shipped_head(variant: str) -> None:
    config = ServingConfig("reference", str(demo_model_dir()), variant=variant, k=2, draft=str(demo_head_dir(variant)))
    assert [finding.line() for finding in preflight(config, WorkloadFacts()) if finding.level == "error"] == []
