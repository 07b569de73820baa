"""The first screen: the verdict in words, the figures behind it, and how sure they are. Pure functions of a run's result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reports.compare import Config, Pair, candidate_of, measured, pairs_of
from reports.rundata import RunData
from reports.text import DASH, config_label, factor, group_label, interval, load_label, ms, number, percent, tau

METRICS: Mapping[str, str] = {
    "e2e_p50": "E2E p50",
    "e2e_p95": "E2E p95",
    "tpot_p50": "TPOT p50",
    "throughput": "Throughput",
    "goodput": "Goodput",
    "cost": "Cost per token",
}

NOTED_DRIFT = 1.03
"""Change of the machine over the run from which on a comparison across it gets a caveat."""

GRADES: Mapping[str, str] = {
    "A": "real text, arrivals, lengths and sampling, as recorded",
    "B": "real text, but its arrivals, lengths or pairing are synthetic",
    "C": "text made up for recorded lengths: no acceptance measured on it supports a verdict",
}


@dataclass(frozen=True, slots=True)
class KeyFigure:
    """One row of off against on."""

    name: str
    off: str
    off_ci: str
    on: str
    on_ci: str
    change: str
    load: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What a reader needs to know first about one trace."""

    trace: str
    verdict: str  # as in result.json; the colour of the panel
    headline: str
    summary: str
    candidate: str | None  # label of the configuration that the figures call "on"
    config: Config | None  # what to run
    figures: tuple[KeyFigure, ...]
    certainty: tuple[str, ...]
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    launch: Mapping[str, Any] | None
    by_engine: tuple[Mapping[str, Any], ...] = field(default=())


def answers(run: RunData) -> list[Answer]:
    return [answer(run, decision) for decision in run.result["decisions"]]


def answer(run: RunData, decision: Mapping[str, Any]) -> Answer:
    """The answer for one trace."""
    candidate = candidate_of(run, decision)
    pairs = pairs_of(run, decision["trace"], candidate) if candidate else []
    return Answer(
        trace=decision["trace"],
        verdict=decision["verdict"],
        headline=headline(decision),
        summary=summary(decision, any(measured(t) for t in run.trials)),
        candidate=config_label(candidate) if candidate else None,
        config=decision["config"],
        figures=tuple(key_figures(pairs, (decision.get("depth") or {}).get("mean_batch"))),
        certainty=tuple(certainty(run, decision, pairs)),
        reasons=tuple(decision["reasons"]),
        warnings=tuple(decision["warnings"]),
        launch=decision["launch"],
        by_engine=tuple(
            {
                **d,
                "label": config_label(d["config"]),
                "group": d.get("group") or (group_label(d["config"]) if d["config"] else DASH),
            }
            for d in decision["by_engine"]
        ),
    )


def headline(decision: Mapping[str, Any]) -> str:
    """The verdict as an instruction."""
    verdict, config = decision["verdict"], config_label(decision["config"])
    if verdict == "enable":
        return f"Turn speculative decoding on: {config}"
    if verdict == "enable_below_batch":
        return f"Turn speculative decoding on below batch size {decision['below_batch']}: {config}"
    if verdict == "skip":
        return "Leave speculative decoding off"
    if verdict == "no_clear_winner":
        return "No clear winner: on and off cannot be told apart"
    return "Not measurable: there is no evidence for a verdict"


def summary(decision: Mapping[str, Any], any_measured: bool) -> str:
    """One sentence with the deciding figure and its interval."""
    speedup = decision["speedup"]
    if not any_measured:
        return "No trial completed, so nothing was measured; the trial table below gives the cause of each failure."
    if (decision["verdict"], _tells_apart(speedup)) in (("skip", False), ("no_clear_winner", True)):
        return str(decision["reasons"][0])  # acceptance, a limit, or throughput decided
    if speedup is None or speedup["value"] is None:
        return "There is no speed-up to show; the reasons below say what is missing."
    name = METRICS.get(speedup["metric"], speedup["metric"])
    value, ci = speedup["value"], speedup["ci95"]
    if ci is None:
        return (
            f"{name} changes by a factor of {factor(value)} against off, with too few requests for an interval: not a result."
        )
    spread = f"95 % interval {interval(ci, factor)}"
    if ci[0] > 1:
        return f"{name} is {factor(value)} better with speculation than without ({spread})."
    if ci[1] < 1:
        return f"{name} with speculation is worse: a speed-up of {factor(value)} ({spread}), where below 1 means slower."
    return f"A tie: {name} has a speed-up of {factor(value)}, and its {spread} includes 1."


def _tells_apart(speedup: Mapping[str, Any] | None) -> bool:
    return speedup is not None and bool(speedup["ci95"]) and not speedup["ci95"][0] <= 1 <= speedup["ci95"][1]


def key_figures(pairs: list[Pair], mean_batch: float | None) -> list[KeyFigure]:
    """Latency at the trace's own load where it was replayed, throughput in closed loop nearest to that load's mean batch size."""
    if not pairs:
        return []
    open_loop = next((p for p in pairs if p.on["load"]["mode"] == "trace"), None)
    closed = _nearest(pairs, open_loop, mean_batch)
    latency = open_loop or closed
    rows: list[KeyFigure] = []
    if latency:
        for metric, quantile, name in (
            ("e2e_s", "p50", "E2E p50"),
            ("e2e_s", "p95", "E2E p95"),
            ("ttft_s", "p50", "TTFT p50"),
            ("tpot_s", "p50", "TPOT p50"),
        ):
            rows.append(_latency_row(latency, metric, quantile, name))
    if closed:
        rows.append(_throughput_row(closed))
    if latency:
        rows.append(_tau_row(latency))
    return rows


def _nearest(pairs: list[Pair], open_loop: Pair | None, mean_batch: float | None) -> Pair | None:
    closed = [p for p in pairs if p.on["load"]["mode"] == "closed"]
    if not closed:
        return None
    mean = mean_batch or ((open_loop.off["metrics"]["batch_size"] or {}).get("mean") if open_loop else None)
    if not mean:
        return closed[len(closed) // 2]
    return min(closed, key=lambda p: abs(math.log(p.on["load"]["concurrency"] / max(mean, 1.0))))


def _latency_row(pair: Pair, metric: str, quantile: str, name: str) -> KeyFigure:
    off, on = (t["metrics"][metric] or {} for t in (pair.off, pair.on))
    a, b = off.get(quantile), on.get(quantile)
    return KeyFigure(
        name=f"{name}, ms",
        off=ms(a),
        off_ci=interval(off.get(f"{quantile}_ci95"), ms),
        on=ms(b),
        on_ci=interval(on.get(f"{quantile}_ci95"), ms),
        change=factor(a / b if a and b else None),
        load=load_label(pair.on["load"]),
    )


def _throughput_row(pair: Pair) -> KeyFigure:
    off, on = pair.off["metrics"], pair.on["metrics"]
    a, b = off["output_tokens_per_s"], on["output_tokens_per_s"]
    return KeyFigure(
        name="Throughput, output tokens/s",
        off=number(a),
        off_ci=interval(off.get("throughput_ci95")),
        on=number(b),
        on_ci=interval(on.get("throughput_ci95")),
        change=factor(b / a if a and b else None),
        load=load_label(pair.on["load"]),
    )


def _tau_row(pair: Pair) -> KeyFigure:
    off, on = pair.off["speculation"], pair.on["speculation"]
    return KeyFigure(
        name="Acceptance length τ, tokens/step",
        off=tau(off["tau"]),
        off_ci="",
        on=tau(on["tau"]),
        on_ci=interval(on["tau_ci95"], tau),
        change=DASH,
        load=load_label(pair.on["load"]),
    )


def certainty(run: RunData, decision: Mapping[str, Any], pairs: list[Pair]) -> list[str]:
    """How sure the answer is, in sentences: interval, requests, content of the trace, failures."""
    lines: list[str] = []
    speedup = decision["speedup"]
    if speedup and speedup["value"] is not None:
        lines.append(_interval_sentence(speedup, decision["verdict"]))
    if pairs:
        counts = sorted({p.on["metrics"]["requests"]["completed"] for p in pairs})
        requests = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
        lines.append(f"On and off were compared at {len(pairs)} loads with {requests} completed requests each.")
    drift = (decision.get("depth") or {}).get("drift") or 1.0
    if drift > NOTED_DRIFT and any(p.on["load"]["mode"] == "trace" and p.off["role"] == "baseline" for p in pairs):
        lines.append(
            f"At the trace's own load off was replayed at the start of the run and on at its end; the machine changed by "
            f"{percent(drift - 1)} in between, so that comparison is only a hint."
        )
    workload = next((w for w in run.result["workloads"] if w["trace"] == decision["trace"]), None)
    if workload and workload["content_grade"]:
        grade = workload["content_grade"]
        lines.append(f"Workload content has grade {grade}: {GRADES[grade]}.")
    mine = [t for t in run.trials if t["load"]["trace"] == decision["trace"]]
    broken = [t for t in mine if t["state"] == "FAIL"]
    if broken:
        lines.append(f"{len(broken)} of {len(mine)} trials on this trace failed and count nowhere.")
    return lines


def _interval_sentence(speedup: Mapping[str, Any], verdict: str) -> str:
    ci = speedup["ci95"]
    if ci is None:
        return "The deciding speed-up has no interval: too few requests."
    if not _tells_apart(speedup):
        return f"The deciding interval, {interval(ci, factor)}, includes 1: by it either could be faster."
    side = "above" if ci[0] > 1 else "below"
    but = ", but times and acceptance contradict each other" if verdict == "no_clear_winner" else ""
    return f"The whole deciding interval, {interval(ci, factor)}, lies {side} 1{but}."
