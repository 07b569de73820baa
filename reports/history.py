"""`tune.py report --history DIR`: every gate.json below a folder as one trend page, with marks where a metric's level changed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.files import write_whole
from harness.gate.metrics import label_of, metric_of
from reports.figures import Chart
from reports.render import page
from reports.rundata import ReportError
from reports.text import clean
from reports.trend import change_points, trend

SHOWN = ("tau", "step", "e2e_p50", "ttft_p50", "throughput")


@dataclass(frozen=True, slots=True)
class Gate:
    """One finished gate, as its gate.json holds it."""

    created: str
    outcome: str
    reason: str
    candidate: str
    values: Mapping[str, float]  # metric key -> the candidate's value


@dataclass(frozen=True, slots=True)
class Series:
    """The gates of one machine and workload in order of time: only these can be compared."""

    label: str
    gates: tuple[Gate, ...]
    charts: tuple[Chart, ...]
    changes: tuple[str, ...]  # in words, newest last


def render_history(folder: Path) -> Path:
    """Write `history.html` into `folder` from every gate.json below it, and return its path.

    Raises:
        ReportError: there is none, or one cannot be read.
    """
    groups: dict[tuple[str, str], list[Gate]] = {}
    for path in sorted(folder.rglob("gate.json")):
        document = _read(path)
        machine = document["environment"].get("fingerprint") or "unknown"
        groups.setdefault((machine, document["baseline"]["backend"]), []).append(_gate(document))
    if not groups:
        raise ReportError(f"{folder}: no gate.json below it; tune.py gate --out {folder}/NAME writes one")
    series = [
        _series(number, *key, sorted(gates, key=lambda g: g.created)) for number, (key, gates) in enumerate(groups.items())
    ]
    path = folder / "history.html"
    write_whole(path, page("history.html.j2", series=series, total=sum(len(s.gates) for s in series)))
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return {
            **document,
            "environment": document["environment"],
            "baseline": document["baseline"],
            "created": document["created"],
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{path}: not a gate's result ({error!r}); remove it or write it again with tune.py gate") from None


def _gate(document: Mapping[str, Any]) -> Gate:
    shown = clean({"reason": (document.get("reasons") or [""])[0], "candidate": document["candidate"]["label"]}, show_text=True)
    values = {row["key"]: float(row["candidate"]) for row in document["metrics"]}
    return Gate(document["created"], document["outcome"], shown["reason"], shown["candidate"], values)


def _series(number: int, machine: str, backend: str, gates: Sequence[Gate]) -> Series:
    keys = [key for key in dict.fromkeys(k for g in gates for k in g.values) if key.partition("@")[0] in SHOWN]
    keys.sort(key=lambda key: (SHOWN.index(key.partition("@")[0]), key))
    several = len({key.partition("@")[2] for key in keys}) > 1
    charts, changes = [], []
    for position, key in enumerate(keys):
        known = [(i, gate) for i, gate in enumerate(gates) if key in gate.values]
        values = np.array([gate.values[key] for _, gate in known])
        marks = change_points(values)
        label = label_of(key, several_loads=several)
        points = [(i, gate.created, gate.values[key]) for i, gate in known]
        at = [known[mark][0] for mark in marks]
        charts.append(trend(f"trend-{number}-{position}", label, points, at, unit=metric_of(key).unit))
        changes += [_words(label, values, marks, i, known[mark][1]) for i, mark in enumerate(marks)]
    return Series(f"{backend}, machine {machine[:12]}", tuple(gates), tuple(charts), tuple(changes))


def _words(label: str, values: NDArray[np.float64], marks: Sequence[int], i: int, gate: Gate) -> str:
    edges = [0, *marks, len(values)]
    before, after = np.median(values[edges[i] : edges[i + 1]]), np.median(values[edges[i + 1] : edges[i + 2]])
    return f"{label} changed by {(after / before - 1) * 100:+.1f} % with the gate of {gate.created} ({gate.candidate})"
