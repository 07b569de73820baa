"""Which trials belong together: on against its own off at the same load, and the speed-up between them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from reports.rundata import RunData

Trial = Mapping[str, Any]
Config = Mapping[str, Any]

_SPECULATION_KEYS = frozenset({"variant", "k", "topk", "num_draft_tokens", "draft", "draft_quantization"})


def server_key(config: Config) -> str:
    """Everything of a configuration but its speculation: equal for `on` and the `off` it is measured against."""
    return json.dumps({k: v for k, v in config.items() if k not in _SPECULATION_KEYS}, sort_keys=True)


def load_key(load: Mapping[str, Any]) -> tuple[Any, ...]:
    return (load["trace"], load["mode"], load["concurrency"], load["time_scale"])


def measured(trial: Trial) -> bool:
    return trial["metrics"] is not None


@dataclass(frozen=True, slots=True)
class Speedup:
    """off ÷ on of E2E p50 at one load. `ci95` is None where the run's result holds no interval for it."""

    value: float
    ci95: tuple[float, float] | None
    on: Trial
    off: Trial

    @property
    def verdict(self) -> str:
        """better, worse, tie (the interval holds 1), or unknown (no interval)."""
        if self.ci95 is None:
            return "unknown"
        return "better" if self.ci95[0] > 1 else "worse" if self.ci95[1] < 1 else "tie"


@lru_cache(maxsize=2)
def _baselines(run: RunData) -> dict[tuple[Any, ...], list[Trial]]:
    found: dict[tuple[Any, ...], list[Trial]] = {}
    for trial in run.trials:
        if measured(trial) and trial["config"]["variant"] == "off" and trial.get("stage") != "capacity":
            found.setdefault((server_key(trial["config"]), *load_key(trial["load"])), []).append(trial)
    return found


def baseline_of(run: RunData, on: Trial) -> Trial | None:
    """The off trial that `on` is held against: same server, same load, and the same purpose where there is a choice."""
    offs = _baselines(run).get((server_key(on["config"]), *load_key(on["load"])), [])
    stages = ("confirm", "baseline") if on["role"] == "confirm" else ("baseline", "confirm")
    return min(offs, key=lambda t: (stages.index(t["role"]) if t["role"] in stages else 2, t["number"]), default=None)


@lru_cache(maxsize=2)
def speedups(run: RunData) -> dict[int, Speedup]:
    """The speed-up of every measured speculative trial that has a baseline, by trial number."""
    return {t["number"]: found for t in run.trials if (found := speedup_of(run, t))}


def speedup_of(run: RunData, on: Trial) -> Speedup | None:
    """E2E p50 of off ÷ on over the requests that both completed.

    Where the result holds the trial's own `speedup` (paired, with an interval) that is shown instead.
    """
    if not measured(on) or on["config"]["variant"] == "off":
        return None
    off = baseline_of(run, on)
    if off is None:
        return None
    given = on.get("speedup")
    if given and given["metric"] == "e2e_p50" and given["value"] is not None:
        ci = given["ci95"]
        return Speedup(given["value"], (ci[0], ci[1]) if ci else None, on, off)
    value = _paired_p50_ratio(run, off, on) or _summary_ratio(off, on)
    return None if value is None else Speedup(value, None, on, off)


def _paired_p50_ratio(run: RunData, off: Trial, on: Trial) -> float | None:
    a, b = run.requests(off["number"]), run.requests(on["number"])
    if a is None or b is None:
        return None
    shared, i, j = np.intersect1d(a.index, b.index, assume_unique=True, return_indices=True)
    if not len(shared):
        return None
    ratio = float(np.nanmedian(a.e2e_s[i]) / np.nanmedian(b.e2e_s[j]))
    return ratio if np.isfinite(ratio) else None


def _summary_ratio(off: Trial, on: Trial) -> float | None:
    a, b = off["metrics"]["e2e_s"], on["metrics"]["e2e_s"]
    return a["p50"] / b["p50"] if a and b and a["p50"] and b["p50"] else None


def candidate_of(run: RunData, decision: Mapping[str, Any]) -> Config | None:
    """The speculative configuration that a decision is about: the chosen one or, where off was chosen, the finalist."""
    config = decision["config"]
    if config and config["variant"] != "off":
        return config
    finalists = [d for d in decision["by_engine"] if d["config"] and d["config"]["variant"] != "off"]
    if config:
        finalists = [d for d in finalists if server_key(d["config"]) == server_key(config)] or finalists
    if finalists:
        return max(finalists, key=lambda d: (d["speedup"] or {}).get("value") or 0.0)["config"]
    tried = [s for s in speedups(run).values() if s.on["load"]["trace"] == decision["trace"]]
    return max(tried, key=lambda s: s.value).on["config"] if tried else None


@dataclass(frozen=True, slots=True)
class Pair:
    off: Trial
    on: Trial


def pairs_of(run: RunData, trace: str, config: Config) -> list[Pair]:
    """`config` against off at every load measured for both, one pair each (confirmation before search); open loop first."""
    found: dict[tuple[Any, ...], Pair] = {}
    order = {"search": 0, "baseline": 0, "confirm": 1}
    for on in sorted(run.trials, key=lambda t: (order[t["role"]], t["number"])):
        if measured(on) and on["config"] == config and on["load"]["trace"] == trace:
            off = baseline_of(run, on)
            if off:
                found[load_key(on["load"])] = Pair(off, on)
    return sorted(found.values(), key=lambda p: (p.on["load"]["mode"] != "trace", p.on["load"]["concurrency"] or 0))


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a batch × K map: a speed-up, or in words why there is none."""

    speedup: Speedup | None
    note: str = ""  # failed, refused, stopped early, not measured


@dataclass(frozen=True, slots=True)
class SpeedupMap:
    """Speed-up by K (rows) and batch size (columns) of one variant on one server and trace."""

    config: Config  # any configuration of the map: its engine, quantization and variant
    batch_sizes: tuple[int, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]  # (label of the row, cells in the order of `batch_sizes`)


_NOTES = {"FAIL": "failed", "INFEASIBLE": "refused", "PRUNED": "stopped early"}


def speedup_maps(run: RunData, trace: str) -> list[SpeedupMap]:
    """One map for each server and variant that was tried on `trace`, in the order in which they were tried."""
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in run.trials:
        if trial["load"]["trace"] == trace and trial["load"]["mode"] == "closed" and trial["config"]["variant"] != "off":
            groups.setdefault((server_key(trial["config"]), trial["config"]["variant"]), []).append(trial)
    return [_map_of(run, trials) for trials in groups.values()]


def _map_of(run: RunData, trials: Sequence[Trial]) -> SpeedupMap:
    batches = tuple(sorted({t["load"]["concurrency"] for t in trials}))
    shapes = sorted({_shape(t["config"]) for t in trials})
    newest_last = sorted(trials, key=lambda t: (t["role"] == "confirm" and measured(t), t["number"]))
    cells = {(_shape(t["config"]), t["load"]["concurrency"]): _cell(run, t) for t in newest_last}
    rows = tuple((_shape_label(s), tuple(cells.get((s, b), Cell(None, "not measured")) for b in batches)) for s in shapes)
    return SpeedupMap(trials[0]["config"], batches, rows)


def _shape(config: Config) -> tuple[Any, ...]:
    return (
        config["k"],
        config.get("topk", 1),
        config.get("num_draft_tokens") or 0,
        config.get("draft_quantization", "none"),
        config.get("draft") or "",
    )


def _shape_label(shape: tuple[Any, ...]) -> str:
    k, topk, nodes, quantization, _ = shape
    label = f"K = {k}" if topk == 1 else f"K = {k}, top-k {topk}, {nodes or '?'} nodes"
    return label if quantization == "none" else f"{label}, {quantization} draft"


def _cell(run: RunData, trial: Trial) -> Cell:
    speedup = speedups(run).get(trial["number"])
    note = _NOTES.get(trial["state"], "")
    if speedup is None and not note:
        note = "no baseline at this load"
    return Cell(speedup, note)
