"""The sections of a report below its answer, in order. One line here and one template in `templates/sections/` each.

A builder takes the run and gives what its template shows; None leaves the section out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from reports import charts, trialtable
from reports.answer import GRADES
from reports.compare import speedup_maps
from reports.rundata import RunData
from reports.text import config_label

Builder = Callable[[RunData], Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True)
class Section:
    """`id` is the anchor and the template's name."""

    id: str
    title: str
    build: Builder


def _if_present(key: str) -> Builder:
    """A section whose shape is open: the value as it stands, where there is one."""
    return lambda run: {"value": run.result[key]} if run.result.get(key) else None


def _basis(run: RunData) -> Mapping[str, Any] | None:
    decisions = [d for d in run.result["decisions"] if d.get("depth")]
    return {"decisions": decisions} if decisions else None


def _engines(run: RunData) -> Mapping[str, Any] | None:
    groups = [d for decision in run.result["decisions"] for d in decision["by_engine"]]
    return {"decisions": run.result["decisions"]} if len(groups) > len(run.result["decisions"]) else None


def _trials(run: RunData) -> Mapping[str, Any]:
    columns, data = trialtable.csv_rows(run)
    rows = trialtable.rows(run)
    choices = {
        "state": sorted({r.state for r in rows}),
        "variant": sorted({r.variant for r in rows}),
        "engine": sorted({r.group for r in rows}),
        "trace": sorted({r.trace for r in rows}),
    }
    return {"columns": trialtable.COLUMNS, "rows": rows, "choices": choices, "csv": {"columns": columns, "rows": data}}


def _maps(run: RunData) -> Mapping[str, Any] | None:
    by_trace = [(d["trace"], speedup_maps(run, d["trace"]), charts.speedup_lines(run, d)) for d in run.result["decisions"]]
    return {"traces": by_trace} if any(maps for _, maps, _ in by_trace) else None


def _schedule(run: RunData) -> Mapping[str, Any] | None:
    decisions = [d for d in run.result["decisions"] if d["k_by_batch_size"]]
    return {"decisions": decisions} if decisions else None


def _charts(build: Callable[[RunData], list[Any]]) -> Builder:
    def section(run: RunData) -> Mapping[str, Any] | None:
        found = build(run)
        return {"charts": found} if found else None

    return section


def _acceptance(run: RunData) -> Mapping[str, Any] | None:
    found, parts = charts.acceptance(run), run.result.get("acceptance") or []
    return {"charts": found, "parts": parts} if found or parts else None


def _workload(run: RunData) -> Mapping[str, Any]:
    return {"workloads": run.result["workloads"], "grades": GRADES}


def _environment(run: RunData) -> Mapping[str, Any]:
    versions = {(t["config"]["backend"], (t["engine"] or {}).get("version")) for t in run.trials}
    engines = sorted((name, version) for name, version in versions if version)
    return {"environment": run.result["environment"], "engines": engines}


def _settings(run: RunData) -> Mapping[str, Any] | None:
    """What the servers of each engine said they run with: settings that are the same on all, and a row for each server of the rest."""
    engines: dict[str, dict[str, Mapping[str, Any]]] = {}
    for trial in run.trials:
        resolved = (trial["engine"] or {}).get("resolved")
        if resolved:
            engines.setdefault(trial["config"]["backend"], {}).setdefault(config_label(trial["config"]), resolved)
    shown = []
    for backend, servers in engines.items():
        names = dict.fromkeys(name for resolved in servers.values() for name in resolved)
        values = {name: [resolved.get(name) for resolved in servers.values()] for name in names}
        same = {name: found[0] for name, found in values.items() if all(value == found[0] for value in found)}
        rest = [{"server": label} | {n: r.get(n) for n in names if n not in same} for label, r in servers.items()]
        shown.append((backend, same, rest if len(same) < len(names) else []))
    return {"engines": shown} if shown else None


def _capacity(run: RunData) -> Mapping[str, Any] | None:
    entries = [
        {"value": entry, "chart": charts.replicas(entry, number)} for number, entry in enumerate(run.result["capacity"] or [])
    ]
    return {"entries": entries} if entries else None


def _cost(run: RunData) -> Mapping[str, Any]:
    has_gpu = bool(run.result["environment"]["gpu"])
    return {"cost": run.result["search_cost"], "chart": charts.cost(run), "has_gpu": has_gpu}


def _predictions(run: RunData) -> Mapping[str, Any] | None:
    if not run.result["predictions"]:
        return None
    trials = {t["number"]: t for t in run.trials}
    return {"rows": [(p, config_label(p["config"]), trials.get(p["measured_in_trial"])) for p in run.result["predictions"]]}


def _reproduce(run: RunData) -> Mapping[str, Any]:
    return {
        "reproduce": run.result.get("reproduce"),
        "settings": run.settings,
        "workloads": run.result["workloads"],
        "fingerprint": run.result["environment"]["fingerprint"],
    }


SECTIONS: tuple[Section, ...] = (
    Section("basis", "Behind the verdict", _basis),
    Section("engines", "Verdict for each engine and quantization", _engines),
    Section("maps", "Speed-up by batch size and K", _maps),
    Section("schedule", "K by batch size", _schedule),
    Section("trials", "All trials", _trials),
    Section("acceptance", "Acceptance", _acceptance),
    Section("latency", "Latency distributions", _charts(charts.latencies)),
    Section("pareto", "Latency against throughput", _charts(charts.pareto)),
    Section("capacity", "Capacity and cost", _capacity),
    Section("workload", "Workload", _workload),
    Section("losslessness", "Losslessness", _if_present("losslessness")),
    Section("diagnosis", "Diagnosis of low acceptance", _if_present("diagnosis")),
    Section("interference", "Interference of prefill with decoding", _if_present("interference")),
    Section("preflight", "Checks before the start", _if_present("preflight")),
    Section("settings", "Settings in effect", _settings),
    Section("environment", "Environment and versions", _environment),
    Section("cost", "What the search cost", _cost),
    Section("predictions", "Predictions", _predictions),
    Section("funnel", "How the search narrowed", _if_present("funnel")),
    Section("selftest", "Self-test of the measuring client", _if_present("selftest")),
    Section("method", "Method and glossary", lambda run: {}),
    Section("reproduce", "How to reproduce", _reproduce),
)
