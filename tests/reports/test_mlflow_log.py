"""A finished run in a real MLflow store on disk."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from run_builder import RunSpec, build_run
from run_sections import HOSTILE, SECRET

from backends.types import ConfigError
from reports import render
from reports.mlflow_log import EXPERIMENT, log_run, open_experiment


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # enough for a test; MLflow wants a database otherwise
    return (tmp_path / "mlruns").as_uri()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    spec = RunSpec(requests=24, k=(3,), variants=("draft_model",), batch_sizes=(1, 16))
    folder = build_run(tmp_path / "run", spec)
    render(folder)
    return folder


def logged(store: str) -> tuple[MlflowClient, Any, list[Any]]:
    """Client, the run of the whole, and the runs of its trials in order."""
    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], max_results=1000)
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    return client, parent, sorted(children, key=lambda run: run.info.run_name)


def test_the_verdict_its_interval_and_the_report_are_there(folder: Path, store: str, tmp_path: Path) -> None:
    run_id = log_run(folder, store)
    client, parent, _ = logged(store)
    assert parent.info.run_id == run_id
    assert parent.info.status == "FINISHED"
    (decision,) = json.loads((folder / "result.json").read_text())["decisions"]
    assert parent.data.params["verdict"] == decision["verdict"] == "enable_below_batch"
    assert (parent.data.params["below_batch"], parent.data.params["config/variant"]) == ("17", "draft_model")
    low, high = decision["speedup"]["ci95"]
    shown = parent.data.metrics
    assert (shown["speedup"], shown["speedup_ci95_low"], shown["speedup_ci95_high"]) == (
        decision["speedup"]["value"],
        low,
        high,
    )
    assert (shown["break_even_batch"], shown["break_even_batch_ci95_low"]) == (17.2, 14.8)
    copy = client.download_artifacts(parent.info.run_id, "report.html", str(tmp_path))
    assert Path(copy).read_bytes() == (folder / "report.html").read_bytes()
    assert {a.path for a in client.list_artifacts(parent.info.run_id)} == {
        "report.html",
        "report.md",
        "result.json",
        "config.yaml",
    }


def test_every_measured_trial_is_a_run_below_it_with_its_figures(folder: Path, store: str) -> None:
    log_run(folder, store)
    _, _, children = logged(store)
    trials = [t for t in json.loads((folder / "result.json").read_text())["trials"] if t["metrics"]]
    assert len(children) == len(trials)
    for child, trial in zip(children, trials, strict=True):
        assert child.data.params["variant"] == trial["config"]["variant"]
        assert child.data.params["load/mode"] == trial["load"]["mode"]
        assert child.data.metrics["e2e_s/p50"] == trial["metrics"]["e2e_s"]["p50"]
        assert child.data.metrics["tau"] == trial["speculation"]["tau"]
        known = trial["metrics"]["e2e_s"]["p50_ci95"]
        if known is None:
            assert "e2e_s/p50_ci95_low" not in child.data.metrics
        else:
            assert child.data.metrics["e2e_s/p50_ci95_low"] == known[0]


def test_the_same_result_is_logged_once_and_a_new_one_again(folder: Path, store: str) -> None:
    assert log_run(folder, store) is not None
    assert log_run(folder, store) is None
    path = folder / "result.json"
    path.write_text(path.read_text().replace('"server_starts": 9', '"server_starts": 10'))
    assert log_run(folder, store) is not None


def test_hostile_names_are_taken_and_no_text_of_prompts_goes_along(tmp_path: Path, store: str) -> None:
    spec = RunSpec(requests=12, k=(1,), variants=("ngram",), batch_sizes=(1, 16), traces=("prod.jsonl", HOSTILE))
    folder = build_run(tmp_path / "run", spec)
    log_run(folder, store)
    _, parent, children = logged(store)
    assert sum(key.endswith("/verdict") for key in parent.data.params) == 2
    assert SECRET not in str([run.data.to_dictionary() for run in (parent, *children)])


def test_without_the_extra_and_with_a_wrong_address_one_line_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--mlflow nonsense://host: "):
        open_experiment("nonsense://user:secret@host")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"pip install 'spectune\[mlflow\]'"):
        open_experiment(tmp_path.as_uri())
