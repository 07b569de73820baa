"""Several runs in one page: verdicts, figures and settings in columns, and what makes them comparable or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from reports.answer import Answer, answer
from reports.rundata import RunData
from reports.text import DASH, words

_COMPARED = (
    "model",
    "drafts",
    "variants",
    "k",
    "batch_sizes",
    "quantization",
    "max_num_seqs",
    "time_scale",
    "seed",
    "base_args",
)
"""Settings whose difference changes what the figures mean."""


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    cells: tuple[Cell, ...]

    @property
    def differs(self) -> bool:
        return len({cell.text for cell in self.cells}) > 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """One trace in all runs; a run that did not measure it has dashes."""

    trace: str
    notes: tuple[str, ...]
    rows: tuple[Row, ...]


def names_of(runs: Sequence[RunData]) -> list[str]:
    """A name for each run: its folder, with the parent's where two are called alike."""
    short = [run.folder.resolve().name for run in runs]
    return [
        name if short.count(name) == 1 else f"{run.folder.resolve().parent.name}/{name}"
        for name, run in zip(short, runs, strict=True)
    ]


def compare_runs(runs: Sequence[RunData]) -> list[Comparison]:
    """Each trace that any run holds."""
    traces = list(dict.fromkeys(d["trace"] for run in runs for d in run.result["decisions"]))
    return [_compare(runs, trace) for trace in traces]


def environments(runs: Sequence[RunData]) -> list[Row]:
    """Machines, engines and settings, one row each."""
    rows = [
        Row("Processor", tuple(Cell(str(run.result["environment"]["host"].get("cpu", DASH))) for run in runs)),
        Row("GPU", tuple(Cell(_gpus(run)) for run in runs)),
        Row("Engine", tuple(Cell(_engines(run)) for run in runs)),
        Row("Fingerprint", tuple(Cell(run.result["environment"]["fingerprint"][:19]) for run in runs)),
    ]
    settings = [_settings(run) for run in runs]
    rows += [
        Row(words(name), tuple(Cell(_plain(given.get(name))) for given in settings))
        for name in _COMPARED
        if len({_plain(given.get(name)) for given in settings}) > 1
    ]
    return rows


def _compare(runs: Sequence[RunData], trace: str) -> Comparison:
    found = [_answer_for(run, trace) for run in runs]
    rows = [Row("Verdict", tuple(Cell(a.headline if a else DASH) for a in found))]
    rows.append(Row("Deciding figure", tuple(Cell(a.summary if a else DASH) for a in found)))
    names = dict.fromkeys((f.name, f.load) for a in found if a for f in a.figures)
    for name, load in names:
        for side in ("off", "on"):
            cells = tuple(_figure(a, name, load, side) for a in found)
            rows.append(Row(f"{name}, {side} ({load})", cells))
    rows.append(Row("K by batch size", tuple(Cell(_schedule(run, trace)) for run in runs)))
    return Comparison(trace, tuple(_notes(runs, trace)), tuple(rows))


def _answer_for(run: RunData, trace: str) -> Answer | None:
    decision = next((d for d in run.result["decisions"] if d["trace"] == trace), None)
    return answer(run, decision) if decision else None


def _figure(found: Answer | None, name: str, load: str, side: str) -> Cell:
    figure = next((f for f in found.figures if (f.name, f.load) == (name, load)), None) if found else None
    if figure is None:
        return Cell(DASH)
    return Cell(getattr(figure, side), getattr(figure, f"{side}_ci"))


def _schedule(run: RunData, trace: str) -> str:
    decision = next((d for d in run.result["decisions"] if d["trace"] == trace), None)
    rows = decision["k_by_batch_size"] if decision else []
    return ", ".join(f"{first} to {last}: {f'K = {k}' if k else 'off'}" for first, last, k in rows) or DASH


def _notes(runs: Sequence[RunData], trace: str) -> list[str]:
    """What a reader must know before comparing figures across columns."""
    notes = []
    hashes = {w["sha256"] for run in runs for w in run.result["workloads"] if w["trace"] == trace}
    if len(hashes) > 1:
        notes.append("The runs replayed different files under this name: their figures are of different workloads.")
    if len({run.result["environment"]["fingerprint"] for run in runs}) > 1:
        notes.append(
            "The runs are from different machines or software: compare verdicts and speed-ups; a difference of absolute latencies "
            "is one of the machines too."
        )
    return notes


def _gpus(run: RunData) -> str:
    return ", ".join(str(gpu.get("name", "GPU")) for gpu in run.result["environment"]["gpu"]) or "none"


def _engines(run: RunData) -> str:
    found = {(t["config"]["backend"], (t["engine"] or {}).get("version")) for t in run.trials}
    return ", ".join(sorted(f"{name} {version}" for name, version in found if version)) or DASH


def _settings(run: RunData) -> Mapping[str, Any]:
    return yaml.safe_load(run.settings) if run.settings else {}


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or DASH
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={v}" for k, v in value.items()) or DASH
    return DASH if value in (None, "") else str(value)
