"""A finished run as MLflow runs: one for the whole, with its report as artefacts, and one below it for each measured trial.

MLflow is an extra (``pip install spectune[mlflow]``) and only its client is used; nothing global is set.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from backends.types import BackendError, ConfigError
from reports.rundata import RunData, load_run
from reports.text import config_label, load_label

EXPERIMENT = "spectune"
RESULT_TAG = "spectune.result_sha256"
ARTEFACTS = ("report.html", "report.md", "result.json", "config.yaml")
PARAM_CHARACTERS = 500  # what MLflow's database takes


def open_experiment(uri: str) -> tuple[Any, str]:
    """Client and experiment id: to be called before anything is measured, so that a wrong URI costs nothing.

    Raises:
        ConfigError: MLflow is not installed, or the store does not answer.
    """
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError:
        raise ConfigError("--mlflow needs MLflow's client: pip install 'spectune[mlflow]' (or mlflow-skinny)") from None
    try:
        client = MlflowClient(tracking_uri=uri)
        known = client.get_experiment_by_name(EXPERIMENT)
        return client, known.experiment_id if known else client.create_experiment(EXPERIMENT)
    except (MlflowException, OSError) as error:
        raise ConfigError(f"--mlflow {_without_password(uri)}: {_first_line(error)}") from None


def log_run(folder: Path, uri: str) -> str | None:
    """Log the finished run in `folder`; its MLflow run id, None where this very result is there already.

    Raises:
        BackendError: the store failed on the way; the run directory is whole all the same.
    """
    client, experiment = open_experiment(uri)
    from mlflow.exceptions import MlflowException

    run = load_run(folder, show_text=False)
    digest = hashlib.sha256((folder / "result.json").read_bytes()).hexdigest()
    try:
        if client.search_runs([experiment], f"tags.`{RESULT_TAG}` = '{digest}'", max_results=1):
            return None
        return _log(client, experiment, run, digest)
    except (MlflowException, OSError) as error:
        raise BackendError(f"--mlflow {_without_password(uri)}: {_first_line(error)}; {folder} holds the whole run") from None


def _log(client: Any, experiment: str, run: RunData, digest: str) -> str:
    parent = client.create_run(experiment, run_name=run.folder.name).info.run_id
    _batch(client, parent, dict(_run_metrics(run)), _run_params(run))
    for trial in run.trials:
        if trial["metrics"] is not None:
            name = f"{trial['number']:04d} {config_label(trial['config'])}, {load_label(trial['load'])}"
            child = client.create_run(experiment, run_name=name, tags={"mlflow.parentRunId": parent}).info.run_id
            _batch(client, child, dict(_trial_metrics(trial)), _trial_params(trial))
            client.set_terminated(child)
    for artefact in ARTEFACTS:
        if (run.folder / artefact).exists():
            client.log_artifact(parent, str(run.folder / artefact))
    client.set_tag(parent, RESULT_TAG, digest)  # last: a log that broke off is made again
    client.set_terminated(parent)
    return str(parent)


def _batch(client: Any, run_id: str, metrics: Mapping[str, float], params: Mapping[str, Any]) -> None:
    from mlflow.entities import Metric, Param

    now_ms = int(time.time() * 1000)
    client.log_batch(
        run_id,
        metrics=[Metric(_name(key), float(value), now_ms, 0) for key, value in metrics.items()],
        params=[Param(_name(key), str(value)[:PARAM_CHARACTERS]) for key, value in params.items() if value is not None],
    )


def _run_metrics(run: RunData) -> Iterator[tuple[str, float]]:
    """The deciding figures of each trace; the trace's name is part of the metric's where there are several."""
    decisions = run.result["decisions"]
    for decision in decisions:
        prefix = f"{decision['trace']}/" if len(decisions) > 1 else ""
        speedup, break_even = decision["speedup"] or {}, decision["break_even_batch"]
        yield from _with_interval(f"{prefix}speedup", speedup.get("value"), speedup.get("ci95"))
        yield from _with_interval(f"{prefix}break_even_batch", break_even["value"], break_even["ci95"])
    yield from _with_interval("search_measured_s", run.result["search_cost"]["measured_s"], None)


def _run_params(run: RunData) -> dict[str, Any]:
    params: dict[str, Any] = {"fingerprint": run.result["environment"]["fingerprint"]}
    params |= {f"workload_sha256/{w['trace']}": w["sha256"] for w in run.result["workloads"]}
    for decision in run.result["decisions"]:
        prefix = f"{decision['trace']}/" if len(run.result["decisions"]) > 1 else ""
        params |= {f"{prefix}verdict": decision["verdict"], f"{prefix}below_batch": decision["below_batch"]}
        params |= {f"{prefix}config/{name}": value for name, value in (decision["config"] or {}).items()}
    return params


def _trial_metrics(trial: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    metrics, speculation = trial["metrics"], trial["speculation"] or {}
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        for quantile in ("p50", "p95"):
            summary = metrics[name] or {}
            yield from _with_interval(f"{name}/{quantile}", summary.get(quantile), summary.get(f"{quantile}_ci95"))
    yield from _with_interval("output_tokens_per_s", metrics["output_tokens_per_s"], metrics.get("throughput_ci95"))
    yield from _with_interval("tau", speculation.get("tau"), speculation.get("tau_ci95"))
    yield from _with_interval("acceptance_rate", speculation.get("acceptance_rate"), None)
    yield from _with_interval("requests_completed", metrics["requests"]["completed"], None)
    speedup = trial.get("speedup") or {}
    yield from _with_interval("speedup", speedup.get("value"), speedup.get("ci95"))


def _trial_params(trial: Mapping[str, Any]) -> dict[str, Any]:
    load = {f"load/{name}": value for name, value in trial["load"].items()}
    return {"state": trial["state"], "stage": trial.get("stage"), **trial["config"], **load}


def _with_interval(name: str, value: float | None, ci95: Any) -> Iterator[tuple[str, float]]:
    if value is not None:
        yield name, value
        if ci95 is not None:
            yield from zip((f"{name}_ci95_low", f"{name}_ci95_high"), ci95, strict=True)


def _name(key: str) -> str:
    """Of letters that MLflow takes in a name."""
    return re.sub(r"[^\w\-./ ]", "_", key, flags=re.ASCII)


def _without_password(uri: str) -> str:
    return re.sub(r"//[^/@]*@", "//", uri)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300]
