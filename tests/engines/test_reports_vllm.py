"""Reports of real runs of vLLM on a CPU: n-gram drafting pays where answers repeat their prompts and not where they do not; and
what long prompts cost those that decode meanwhile. Verdicts need a machine that does nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllm_server import ENV, python

from tests.audited import POOLS
from tests.real_runs import SAMPLE, tune

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

VLLM = ("--backend", "vllm", "--model", "demo", "--variants", "off,ngram", "--max-num-seqs", "16")
BASE = ("--base-args", "--max-model-len 2048 --enforce-eager --dtype float32")


def engine() -> tuple[str, str]:
    return "--engine", f"vllm={python()}"


def workload(folder: Path, pool: str, temperature: float) -> Path:
    """A trace of a bundled pool's prompts, each with a seed of its own where it samples."""
    rows = [json.loads(line) for line in (POOLS / f"{pool}.jsonl").read_text().splitlines()]
    asked = [{**row, "temperature": temperature, **({"seed": i} if temperature else {})} for i, row in enumerate(rows)]
    path = folder / f"{pool}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in asked))
    return path


# Small models loop when they are greedy, which n-gram drafting then profits from; chat is sampled.
@pytest.mark.slow
@pytest.mark.parametrize(("pool", "temperature", "verdict"), [("grounded", 0.0, "enable"), ("chat", 1.0, "skip")])
def test_ngram_pays_on_grounded_text_and_not_on_open_ended_text(
    pool: str, temperature: float, verdict: str, tmp_path: Path
) -> None:
    result = tune(
        f"vllm-{pool}",
        workload(tmp_path, pool, temperature),
        *(*VLLM, *engine(), *BASE, "--k", "4", "--batch-sizes", "1,4", "--strategy", "grid"),
        *("--max-output-tokens", "64", "--search-requests", "16", "--confirm-requests", "60"),
        env=ENV,
    )
    (decision,) = result["decisions"]
    assert decision["verdict"] == verdict, decision["reasons"]
    if verdict == "enable":
        assert decision["speedup"]["ci95"][0] > 1


@pytest.mark.slow
def test_the_interference_probe_tells_what_long_prompts_cost_the_decoding() -> None:
    result = tune(
        "vllm-interference",
        SAMPLE,
        *(*VLLM, *engine(), *BASE, "--k", "4", "--batch-sizes", "4", "--probe", "interference", "--strategy", "grid"),
        *(
            "--limit",
            "24",
            "--max-output-tokens",
            "16",
            "--time-scale",
            "0.1",
            "--search-requests",
            "8",
            "--confirm-requests",
            "8",
        ),
        env=ENV,
    )
    entries = result["interference"]
    assert {(e["config"]["variant"], e["config"]["chunked_prefill"]) for e in entries} == {
        *(("ngram", True), ("ngram", False), ("off", True), ("off", False)),
    }
    for entry in entries:
        assert entry["long_prompt_tokens"] > 200
        assert entry["tpot_before_s"] > 0
        assert entry["largest_gap_during_s"] > entry["tpot_before_s"]
        assert entry["order"] in ("decode first", "shared", "prefill first")
    page = (Path(__file__).parents[2] / "runs" / "tests" / "vllm-interference" / "report.html").read_text()
    assert "Interference of prefill with decoding" in page
