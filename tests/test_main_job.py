"""The main job from trace to report on a real engine with a tiny random model: search, resume, kill -9."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from harness.result_schema import validate
from tests.checkpoints import write_llama
from tests.running import wait_until

ROOT = Path(__file__).parent.parent
OPTIONS = (
    *("--variants", "off,ngram", "--k", "2", "--batch-sizes", "1,4", "--max-output-tokens", "12"),
    *("--search-requests", "8", "--confirm-requests", "12", "--time-scale", "0.1"),
)


def command(trace: Path, model: Path, out: Path) -> list[str]:
    return [sys.executable, str(ROOT / "tune.py"), "--trace", str(trace), "--model", str(model), "--out", str(out), *OPTIONS]


def trials(out: Path) -> dict[str, float]:
    """Finished trials and when each was written."""
    return {path.parent.name: path.stat().st_mtime for path in out.glob("trials/*/trial.json")}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [
        {"arrival_s": i * 1.0, "prompt": f"again and again and again number {i % 5} again and again", "max_tokens": 12}
        for i in range(24)
    ]
    path = tmp_path / "loop.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_run_writes_a_valid_result_and_a_report_and_a_second_run_measures_nothing(
    tmp_path: Path, trace: Path, tiny_model: Path
) -> None:
    out = tmp_path / "run"
    subprocess.run([*command(trace, tiny_model, out), "--replays", "5"], check=True, timeout=240)
    result = json.loads((out / "result.json").read_text())
    validate(result)
    replays = [t["metrics"] for t in result["trials"] if t["load"]["mode"] == "trace" and t["config"]["variant"] == "off"]
    assert len(replays) == 5
    low, high = replays[0]["e2e_s"]["p50_ci95"]
    assert low < sum(replay["e2e_s"]["p50"] for replay in replays) / 5 < high
    assert all(replay["throughput_ci95"] == replays[0]["throughput_ci95"] is not None for replay in replays)
    workload = result["workloads"][0]
    assert workload["read"] == workload["kept"] + sum(workload["dropped"].values()) == 24
    measured = [t for t in result["trials"] if t["state"] == "COMPLETE"]
    assert {t["config"]["variant"] for t in measured} == {"off", "ngram"}
    assert all(t["speculation"]["tau"] == 1.0 for t in measured if t["config"]["variant"] == "off")
    assert all(t["metrics"]["requests"]["failed"] == 0 for t in measured)
    (audit,) = result["losslessness"]
    assert audit["verdict"] in ("identical", "within_control")
    (decision,) = result["decisions"]
    assert len(decision["depth"]["rules_of_thumb"]) == 6
    assert decision["launch"]["command"]
    rows = pq.read_table(out / "trials" / "0000" / "requests.parquet").to_pylist()
    assert [row["index"] for row in rows]
    assert {row["status"] for row in rows} == {"completed"}
    report = (out / "report.html").read_text()
    assert "again and again" not in report
    assert workload["input_tokens"]["p50"] > 0, "counted by the engine: the trace holds none"
    assert result["selftest"]["checks"]
    assert "Self-test of the measuring client" in report
    before = trials(out)
    again = subprocess.run(command(trace, tiny_model, out), check=True, timeout=120, capture_output=True, text=True)
    assert trials(out) == before
    assert "1/" not in again.stderr


@pytest.mark.slow
def test_a_draft_that_does_not_know_its_target_is_diagnosed(tmp_path: Path, trace: Path, tiny_model: Path) -> None:
    draft, out = write_llama(tmp_path / "draft", seed=7), tmp_path / "run"
    weights = load_file(draft / "model.safetensors")
    weights["model.norm.weight"] = -weights["model.norm.weight"]  # drafts the least likely token
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    rows = [{**json.loads(line), "temperature": 0} for line in trace.read_text().splitlines()]
    trace.write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )  # sampling with shared noise hides a bad draft of a flat model
    options = ["--variants", "off,draft_model", "--draft", f"draft_model={draft}"]
    subprocess.run([*command(trace, tiny_model, out), *options], check=True, timeout=600)
    result = json.loads((out / "result.json").read_text())
    (found,) = result["diagnosis"]
    assert found["first_position_acceptance"] < 0.3
    assert found["causes"][0]["cause"] == "draft trained for another target"
    assert found["causes"][0]["certainty"] == "likely"
    (audit,) = result["losslessness"]
    assert audit["verdict"] in ("identical", "within_control")
    assert "draft trained for another target" in (out / "report.html").read_text()


@pytest.mark.slow
def test_a_quantized_kv_cache_is_an_axis_and_its_quality_is_measured(tmp_path: Path, trace: Path, tiny_model: Path) -> None:
    out = tmp_path / "run"
    options = ["--kv-cache-dtype", "auto,int8", "--batch-sizes", "2", "--max-quality-loss", "1"]
    subprocess.run([*command(trace, tiny_model, out), *options], check=True, timeout=300)
    result = json.loads((out / "result.json").read_text())
    validate(result)
    measured = [t for t in result["trials"] if t["state"] == "COMPLETE"]
    assert {(t["config"]["variant"], t["config"]["kv_cache_dtype"]) for t in measured} == {
        (variant, stored) for variant in ("off", "ngram") for stored in ("auto", "int8")
    }
    assert all(t["engine"]["resolved"]["kv_cache_dtype"] == t["config"]["kv_cache_dtype"] for t in measured)
    assert json.loads((out / "quality.json").read_text())["none, int8 KV cache"]["mean_kl"] > 0
    shown = [t["quality"] for t in measured if t["config"]["kv_cache_dtype"] == "int8"]
    assert all(quality["mean_kl"] > 0 for quality in shown)
    (decision,) = result["decisions"]
    assert {group["group"] for group in decision["by_engine"]} == {
        "reference, weights none",
        "reference, weights none, KV cache int8",
    }


def test_a_killed_run_leaves_no_engine_and_goes_on_where_it_stopped(tmp_path: Path, trace: Path, tiny_model: Path) -> None:
    out = tmp_path / "run"
    run = subprocess.Popen(command(trace, tiny_model, out), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    wait_until(lambda: len(trials(out)) >= 3, run, 120)
    family = psutil.Process(run.pid).children(recursive=True)
    assert family, "an engine must be running"
    done = trials(out)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    subprocess.run(command(trace, tiny_model, out), check=True, timeout=240, stderr=subprocess.DEVNULL)
    after = trials(out)
    assert {number: after[number] for number in done} == done
    keys = [json.loads(path.read_text())["key"] for path in out.glob("trials/*/trial.json")]
    assert len(keys) == len(set(keys))


def test_ctrl_c_leaves_a_resumable_directory_and_exit_code_130(tmp_path: Path, trace: Path, tiny_model: Path) -> None:
    out = tmp_path / "run"
    run = subprocess.Popen(command(trace, tiny_model, out), stderr=subprocess.PIPE, text=True)
    wait_until(lambda: bool(trials(out)), run, 120)
    family = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signal.SIGINT)
    _, stderr = run.communicate(timeout=30)
    assert run.returncode == 130
    assert "--out" in stderr
    assert "Traceback" not in stderr
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
