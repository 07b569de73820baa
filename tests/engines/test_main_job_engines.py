"""The main job on real engines, from a trace to a report, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import target
from sglang_server import CPU_BASE_ARGS, ENVIRONMENT, sglang_python
from vllm_server import ENV, ROOT, python

from backends.reference.demo_model import demo_model_dir

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

SAMPLE = ROOT / "workloads" / "samples" / "demo.jsonl"
SMALL = (
    "--limit",
    "40",
    "--search-requests",
    "6",
    "--confirm-requests",
    "12",
    "--max-output-tokens",
    "24",
    "--time-scale",
    "0.2",
)


def tune(out: Path, *options: str, env: dict[str, str]) -> dict[str, Any]:
    """Run the main job on the bundled sample; its result."""
    argv = [sys.executable, str(ROOT / "tune.py"), "--trace", str(SAMPLE), "--out", str(out), *SMALL, *options]
    done = subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (out / "report.html").stat().st_size > 20_000
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return result


@pytest.mark.slow  # a dozen server starts
def test_vllm_and_the_reference_engine_in_one_run_and_one_report(tmp_path: Path) -> None:
    model = str(demo_model_dir())
    result = tune(
        tmp_path / "run",
        *("--backend", "reference", "--backend", "vllm", "--engine", f"vllm={python()}", "--model", model),
        *("--variants", "off,ngram,draft_model", "--draft", f"draft_model={model}", "--k", "3", "--batch-sizes", "1,4"),
        *("--base-args", "vllm=--max-model-len 2048 --enforce-eager --dtype bfloat16"),
        env=ENV,
    )
    measured = [trial for trial in result["trials"] if trial["state"] == "COMPLETE"]
    assert not [trial["reason"] for trial in result["trials"] if trial["state"] == "FAIL"]
    for backend in ("reference", "vllm"):
        mine = [trial for trial in measured if trial["config"]["backend"] == backend]
        assert {trial["config"]["variant"] for trial in mine} == {"off", "ngram", "draft_model"}
        off = [trial["speculation"]["tau"] for trial in mine if trial["config"]["variant"] == "off"]
        assert set(off) == {1.0}
        own_draft = [trial["speculation"]["tau"] for trial in mine if trial["config"]["variant"] == "draft_model"]
        # The target drafts for itself: nearly all is accepted, but vLLM drafts greedily and accepts little of sampled requests.
        assert min(own_draft) > (1.2 if backend == "vllm" else 3.0)
    (decision,) = result["decisions"]
    assert {row["config"]["backend"] for row in decision["by_engine"] if row["config"]} <= {"reference", "vllm"}
    assert len(decision["by_engine"]) == 2


def test_sglang_from_the_trace_to_a_report_that_shows_what_it_resolved(tmp_path: Path) -> None:
    """On a small random model, since the kernel stand-in is slow: the way is looked at, not the figures."""
    out, model = tmp_path / "run", target(tmp_path / "target", demo_model_dir(), embedding=40.0)
    result = tune(
        out,
        *("--backend", "sglang", "--engine", f"sglang={sglang_python()}", "--model", str(model)),
        *("--variants", "off,ngram", "--k", "3", "--batch-sizes", "1,2", "--max-num-seqs", "8"),
        *("--base-args", f"sglang={' '.join(CPU_BASE_ARGS)} --dtype float32"),
        env=ENVIRONMENT,
    )
    assert not [trial["reason"] for trial in result["trials"] if trial["state"] == "FAIL"]
    measured = [trial for trial in result["trials"] if trial["state"] == "COMPLETE"]
    assert {trial["config"]["variant"] for trial in measured} == {"off", "ngram"}
    for trial in measured:
        ngram, speculation, resolved = trial["config"]["variant"] == "ngram", trial["speculation"], trial["engine"]["resolved"]
        assert resolved["speculative_algorithm"] == ("NGRAM" if ngram else None)
        assert (resolved["max_num_seqs"], resolved["dtype"], resolved["device"]) == (8, "float32", "cpu")
        if ngram:
            assert speculation["tau_counter"] == pytest.approx(speculation["tau"], rel=0.05)
            assert 1.0 <= speculation["tau"] <= 4.0
        else:
            assert speculation["tau"] is None  # SGLang counts no steps where it does not speculate
    assert {entry["verdict"] for entry in result["losslessness"]} == {"identical"}
    html = (out / "report.html").read_text()
    assert "Settings in effect" in html
    assert "NGRAM" in html
    assert result["decisions"][0]["verdict"] in ("enable", "skip", "no_clear_winner", "enable_below_batch", "not_measurable")
