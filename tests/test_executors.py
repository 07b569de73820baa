"""The whole job on two slots (the simulated engine; GPUs in name only): a killed coordinator, and a larger range of K."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import optuna
import psutil
import pytest

from harness.search import open_storage
from tests.harness.simulated_lab import engines_of, write_trace, write_world
from tests.running import wait_until

ROOT = Path(__file__).parent.parent


def command(folder: Path, k: str, strategy: str) -> list[str]:
    options = ["--trace", str(folder / "trace.jsonl"), "--backend", "simulated", "--model", str(folder / "world.json")]
    options += ["--variants", "off,ngram", "--k", k, "--batch-sizes", "2", "--strategy", strategy, "--max-num-seqs", "8"]
    options += ["--search-requests", "4", "--confirm-requests", "6", "--time-scale", "0.2", "--out", str(folder / "run")]
    return [sys.executable, str(ROOT / "tune.py"), *options, "--executor", "local"]


def trials(folder: Path) -> dict[str, float]:
    """Finished trials and when each was written."""
    return {path.parent.name: path.stat().st_mtime for path in (folder / "run").glob("trials/*/trial.json")}


def completed(folder: Path) -> list[optuna.trial.FrozenTrial]:
    """COMPLETE trials of all studies of the journal, imported ones counted where they were measured."""
    storage = open_storage(None, folder / "run")
    studies = [optuna.load_study(study_name=s.study_name, storage=storage) for s in optuna.get_all_study_summaries(storage)]
    found = [t for s in studies for t in s.get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE])]
    return [trial for trial in found if "imported_from" not in trial.user_attrs]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["grid", "funnel"])
def test_a_killed_coordinator_leaves_no_engine_and_a_larger_k_range_keeps_what_was_measured(
    tmp_path: Path, strategy: str
) -> None:
    write_world(tmp_path)
    write_trace(tmp_path)
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1"}
    run = subprocess.Popen(command(tmp_path, "1..3", strategy), env=env, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    wait_until(lambda: len(trials(tmp_path)) >= 3, run, 300)
    family = psutil.Process(run.pid).children(recursive=True)
    done = trials(tmp_path)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    _, alive = psutil.wait_procs([*family, *engines_of(tmp_path)], timeout=10)
    assert not alive
    subprocess.run(command(tmp_path, "1..5", strategy), env=env, check=True, timeout=600, stderr=subprocess.DEVNULL)
    after = trials(tmp_path)
    assert {number: after[number] for number in done} == done
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    found = [json.loads(path.read_text()) for path in tmp_path.glob("run/trials/*/trial.json")]
    keys = [trial["key"] for trial in found if trial["state"] != "FAIL"]  # a busy host may make the client late
    assert len(keys) == len(set(keys))
    searched = [t["config"]["k"] for t in result["trials"] if t["stage"] == "search"]
    if strategy == "grid":
        assert set(searched) == {1, 2, 3, 4, 5}
    params = [(t.params["k"], t.params["batch_size"]) for t in completed(tmp_path)]
    assert len(params) == len(set(params))
    workers = {t["worker"] for t in result["trials"] if t["stage"] == "search"}
    assert workers <= {"GPU 0", "GPU 1"}
    assert not engines_of(tmp_path)
