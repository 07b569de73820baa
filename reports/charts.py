"""Which charts a run gets: picks the trials, takes their numbers, and hands them to `reports.figures`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from reports import figures
from reports.compare import candidate_of, measured, pairs_of, server_key, speedups
from reports.figures import Chart, Line, Point
from reports.rundata import RunData
from reports.text import VARIANT_NAMES, config_label, group_label, load_label

MAX_SERIES = 6
"""Lines in one chart of position rates, above which it can no longer be read."""


def chart_id(kind: str, *parts: Any) -> str:
    """An id for HTML and a file name for the CSV, of plain letters whatever the names hold."""
    text = "-".join([kind, *(str(p) for p in parts)])
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def speedup_lines(run: RunData, decision: Mapping[str, Any]) -> list[Chart]:
    """One chart for each server on this trace: its finalist strong, the rest thin."""
    trace, position = decision["trace"], run.result["decisions"].index(decision)
    finalists = {server_key(d["config"]): d for d in decision["by_engine"] if d["config"]}
    candidate = candidate_of(run, decision)
    if candidate:
        finalists.setdefault(server_key(candidate), {**decision, "config": candidate})
    lines: dict[str, dict[str, list[Any]]] = {}
    for gain in sorted(speedups(run).values(), key=lambda g: (g.on["role"] == "confirm", g.on["load"]["concurrency"] or 0)):
        if gain.on["load"]["trace"] == trace and gain.on["load"]["mode"] == "closed":
            lines.setdefault(server_key(gain.on["config"]), {}).setdefault(config_label(gain.on["config"]), []).append(gain)
    charts = []
    for number, (server, by_config) in enumerate(lines.items()):
        finalist = finalists.get(server)
        lead = config_label(finalist["config"]) if finalist else None
        drawn = [_line(label, gains, label == lead) for label, gains in by_config.items()]
        break_even = finalist["break_even_batch"] if finalist else None
        where = f"{group_label(next(iter(by_config.values()))[0].on['config'])}, {trace}"
        charts.append(figures.speedup_by_batch(chart_id("speedup", position, number), drawn, break_even, where=where))
    return charts


def _line(label: str, gains: list[Any], lead: bool) -> Line:
    by_batch = {g.on["load"]["concurrency"]: g for g in gains}  # confirmation comes last and stands
    ordered = [by_batch[b] for b in sorted(by_batch)]
    return Line(
        label,
        tuple(float(g.on["load"]["concurrency"]) for g in ordered),
        tuple(g.value for g in ordered),
        tuple(g.ci95 for g in ordered),
        lead,
    )


def acceptance(run: RunData) -> list[Chart]:
    """Position rates of the longest chain of each variant, for each server and trace."""
    charts = []
    for number, ((_, trace), trials) in enumerate(_by_server(run).items()):
        best: dict[str, Mapping[str, Any]] = {}
        for trial in trials:
            rates, label = trial["speculation"]["position_rates"], VARIANT_NAMES[trial["config"]["variant"]]
            if rates and len(rates) >= len(
                best.get(label, {"speculation": {"position_rates": ()}})["speculation"]["position_rates"]
            ):
                best[label] = trial
        series = {config_label(t["config"]): t["speculation"]["position_rates"] for t in list(best.values())[:MAX_SERIES]}
        if series:
            where = f"{group_label(trials[0]['config'])}, {trace}"
            charts.append(figures.position_rates(chart_id("positions", number), series, where=where))
    return charts


def _by_server(run: RunData) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for trial in run.trials:
        if measured(trial):
            groups.setdefault((server_key(trial["config"]), trial["load"]["trace"]), []).append(trial)
    return groups


def latencies(run: RunData) -> list[Chart]:
    """E2E, TTFT and TPOT of off and the finalist at the load that latency is judged at."""
    charts = []
    for number, decision in enumerate(run.result["decisions"]):
        candidate = candidate_of(run, decision)
        pairs = pairs_of(run, decision["trace"], candidate) if candidate else []
        if not pairs or candidate is None:
            continue
        pair = pairs[0] if pairs[0].on["load"]["mode"] == "trace" else pairs[len(pairs) // 2]
        off, on = run.requests(pair.off["number"]), run.requests(pair.on["number"])
        if off is None or on is None:
            continue
        where = f"{decision['trace']}, {load_label(pair.on['load'])}"
        for name, title in (("e2e_s", "E2E"), ("ttft_s", "TTFT"), ("tpot_s", "TPOT")):
            series = {label: _known(getattr(r, name)) for label, r in (("off", off), (config_label(candidate), on))}
            if all(len(values) for values in series.values()):
                charts.append(figures.latency_ecdf(chart_id("latency", title, number), title, series, where=where))
    return charts


def _known(values: Any) -> Any:
    return values[~np.isnan(values)]


def pareto(run: RunData) -> list[Chart]:
    """Every complete closed-loop trial with both figures, one chart for each server and trace."""
    charts = []
    for number, ((_, trace), trials) in enumerate(_by_server(run).items()):
        points = [_point(t) for t in trials if t["load"]["mode"] == "closed" and t["state"] == "COMPLETE" and _has_both(t)]
        if len(points) > 1:
            where = f"{group_label(trials[0]['config'])}, {trace}"
            charts.append(figures.latency_throughput(chart_id("pareto", number), points, where=where))
    return charts


def _has_both(trial: Mapping[str, Any]) -> bool:
    metrics = trial["metrics"]
    return bool(metrics["e2e_s"] and metrics["e2e_s"]["p50"] and metrics["output_tokens_per_s"])


def _point(trial: Mapping[str, Any]) -> Point:
    config, metrics = trial["config"], trial["metrics"]
    return Point(
        label=config_label(config),
        family=VARIANT_NAMES[config["variant"]],
        trial=trial["number"],
        load=f"{trial['load']['concurrency']} in flight",
        latency_s=metrics["e2e_s"]["p50"],
        tokens_per_s=metrics["output_tokens_per_s"],
    )


def replicas(entry: Mapping[str, Any], number: int) -> Chart | None:
    """Replicas over time scale with off and on; None without arrivals or where nothing passes."""
    rows = {s["side"]: s["fleet"] for s in entry["sides"] if s["fleet"] and s["fleet"][0]["replicas_peak"]}
    return figures.replicas(chart_id("replicas", number), rows, where=entry["trace"]) if rows else None


def cost(run: RunData) -> Chart | None:
    """Time by stage; None where nothing was spent."""
    spent = {name: stage_seconds(value) for name, value in run.result["search_cost"]["stages"].items()}
    known = {name: value for name, value in spent.items() if value}
    return figures.stage_costs("time-by-stage", known, run.result["search_cost"]["full_grid_estimated_s"]) if known else None


def stage_seconds(stage: Any) -> float | None:
    return stage.get("seconds") if isinstance(stage, Mapping) else stage
