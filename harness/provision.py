"""The `capacity` part of `result.json`: what one replica serves with off and with the finalist, and what the trace needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from backends.types import ServingConfig
from harness.capacity import OpenLoop, Point, bracket, ceiling, demand, fleet, is_saturated, usd_per_million_tokens
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
        replays = open_loops(findings, trace, server)
        passing, failing = bracket(replays)
        sized_by = "open loop" if passing else "closed loop"
        rps = passing.requests_per_s if passing else found.passing_rps
        rows = fleet(needed, rps, usd_per_replica_hour=per_replica) if needed else []
        sides.append(
            {
                "side": side,
                "config": server.to_dict(),
                **found.to_dict(),
                "predicted_rps": found.predicted_rps if settings.slo else None,
                "open_loop": {
                    "passing": passing.to_dict() if passing else None,
                    "failing": failing.to_dict() if failing else None,
                    "replays": [replay.to_dict() for replay in replays],
                },
                "sized_by": sized_by,
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


def open_loops(findings: Findings, trace: Trace, config: ServingConfig) -> list[OpenLoop]:
    """Every replay of the trace's arrivals on one server, at its own rate and at others; empty without limits.

    A rate above what closed loops complete, where more in flight no longer raises it, is a queue that grows for ever: a replay
    may be too short, or the limits of the wrong kind (TPOT), to show that.
    """
    points, found = points_of(findings, trace.name, config), []
    most = 1.05 * max(p.requests_per_s for p in points) if is_saturated(points) else math.inf
    for trial in findings.trials if findings.settings.slo else ():
        if trial.measured and trial.config == config and (trial.load.trace, trial.load.mode) == (trace.name, "trace"):
            asked = demand(trace.arrivals_s[list(trial.requests)])
            if asked:
                rate = asked.mean_rps / (trial.load.time_scale or 1.0)
                broken = _broken(trial, findings.settings.slo) + (["saturation"] if rate > most else [])
                found.append(OpenLoop(rate, tuple(broken), trial.number))
    return found


def _own_load(findings: Findings, trace: str, config: ServingConfig) -> dict[str, Any] | None:
    """The trace's own arrivals as they were replayed: a rate that was really sent, and whether it met the limits."""
    load = open_load(trace, findings.settings)
    trial = next((t for stage in ("confirm", "baseline") if (t := findings.find(config, load, stage))), None)
    if trial is None or trial.metrics is None:
        return None
    broken = _broken(trial, findings.settings.slo)
    return {"requests_per_s": trial.metrics["requests_per_s"] or 0.0, "meets_slo": not broken, "broken": broken}


def _broken(trial: Trial, slo: Mapping[str, float]) -> list[str]:
    """Limits that an open-loop trial did not meet; a request that was not answered meets none."""
    counts = (trial.metrics or {})["requests"]
    lost = ["requests not answered"] if slo and counts["completed"] < counts["sent"] else []
    return Point(0, 0.0, 0.0, _latencies(trial, slo)).broken(slo) + lost


def _latencies(trial: Trial, slo: Mapping[str, float]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name in slo:
        metric, percentile = name.rsplit("_", 1)
        summary = (trial.metrics or {})[f"{metric}_s"]
        found[name] = summary[percentile] if summary else None
    return found
