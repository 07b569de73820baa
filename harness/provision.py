"""The `capacity` part of `result.json`: what one replica serves with off and with the finalist, and what the trace needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.types import ServingConfig
from harness.capacity import Point, ceiling, demand, fleet, is_saturated, usd_per_million_tokens
from harness.findings import Finalists, Findings, closed_load, open_load
from harness.store import Trial
from workloads.types import Trace


def capacity(findings: Findings, traces: Mapping[str, Trace], finalists: Finalists) -> list[dict[str, Any]]:
    """One entry for each trace and finalist that may win. Everything in it is measured or worked out from what was."""
    return [
        _entry(findings, trace, config)
        for trace in traces.values()
        for config in finalists.values()
        if findings.may_win(config)
    ]


def _entry(findings: Findings, trace: Trace, config: ServingConfig) -> dict[str, Any]:
    settings = findings.settings
    needed = demand(trace.arrivals_s * settings.time_scale)
    hourly = settings.gpu_hourly_usd
    per_replica = None if hourly is None else hourly * config.tensor_parallel
    sides = []
    for side, server in (("off", config.off()), ("on", config)):
        points = points_of(findings, trace.name, server)
        found = ceiling(points, settings.slo)
        rows = fleet(needed, found.passing_rps, usd_per_replica_hour=per_replica) if needed else []
        sides.append(
            {
                "side": side,
                "config": server.to_dict(),
                **found.to_dict(),
                "saturated": is_saturated(points),
                "usd_per_million_output_tokens": usd_per_million_tokens(found.passing_tokens_per_s, per_replica),
                "own_load": _own_load(findings, trace.name, server),
                "fleet": [row.to_dict() for row in rows],
            }
        )
    return {
        "trace": trace.name,
        "slo": dict(settings.slo),
        "gpu_hourly_usd": hourly,
        "demand": None
        if needed is None
        else {
            "mean_rps": needed.mean_rps,
            "p95_minute_rps": needed.p95_minute_rps,
            "peak_minute_rps": needed.peak_minute_rps,
            "minutes": needed.minutes,
        },
        "sides": sides,
    }


def points_of(findings: Findings, trace: str, config: ServingConfig) -> list[Point]:
    """The closed loops of one server, confirmation before search."""
    stages = ("confirm", "baseline" if config.variant == "off" else "search")
    points = []
    for batch in findings.space.batch_sizes:
        load = closed_load(trace, batch)
        trial = next((t for stage in stages if (t := findings.find(config, load, stage))), None)
        if trial and trial.metrics and trial.metrics["requests_per_s"] and trial.metrics["output_tokens_per_s"]:
            rates = trial.metrics["requests_per_s"], trial.metrics["output_tokens_per_s"]
            points.append(Point(batch, *rates, _latencies(trial, findings.settings.slo)))
    return points


def _own_load(findings: Findings, trace: str, config: ServingConfig) -> dict[str, Any] | None:
    """The trace's own arrivals as they were replayed: a rate that was really sent, and whether it met the limits."""
    load = open_load(trace, findings.settings)
    trial = next((t for stage in ("confirm", "baseline") if (t := findings.find(config, load, stage))), None)
    if trial is None or trial.metrics is None:
        return None
    latencies = _latencies(trial, findings.settings.slo)
    point = Point(0, trial.metrics["requests_per_s"] or 0.0, trial.metrics["output_tokens_per_s"] or 0.0, latencies)
    broken = point.broken(findings.settings.slo)
    return {"requests_per_s": point.requests_per_s, "meets_slo": not broken, "broken": broken}


def _latencies(trial: Trial, slo: Mapping[str, float]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name in slo:
        metric, percentile = name.rsplit("_", 1)
        summary = (trial.metrics or {})[f"{metric}_s"]
        found[name] = summary[percentile] if summary else None
    return found
