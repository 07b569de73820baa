"""`result.json` from the findings of a run: decisions, trials, what the search cost. Pure but for the clock-free store."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from backends.deploy import as_dockerfile, as_kubernetes
from backends.k_schedule import FOLLOWED_BY
from backends.registry import ADAPTERS
from backends.types import ServingConfig, WorkloadFacts
from harness.breakdown import breakdown
from harness.decide import Judgement, judge
from harness.depth import depth, overhead_of
from harness.evidence import pair
from harness.findings import Finalists, Findings
from harness.provision import capacity
from harness.quality import quality_key
from harness.replicates import replay_interval
from harness.space import group_label
from harness.statistics import Estimate
from harness.store import RunStore, Trial
from harness.types import Decision
from workloads.types import Trace, percentiles

DRIFT_LIMIT = 0.03
"""Change of the baseline between its first and its last measurement above which the report warns."""
TAU_FALLS = 1.1
"""Tau at the smallest batch size ÷ at the largest above which, where the intervals are apart, the report warns."""


def build_result(
    findings: Findings,
    finalists: Finalists,
    traces: Mapping[str, Trace],
    store: RunStore,
    confirm_requests: int,
    environment: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything the report shows. `confirm_requests`: requests of one confirmation load over all traces."""
    return {
        "schema": 1,
        "workloads": [_workload(findings, trace) for trace in traces.values()],
        "environment": environment,
        "trials": [
            {**public_trial(t, findings.quality, replays_of(t, findings.trials)), "speedup": _trial_speedup(findings, t)}
            for t in findings.trials
        ],
        "predictions": [],
        "decisions": [decision(findings, trace, finalists).to_dict() for trace in traces.values()],
        "preflight": [],
        "losslessness": [],
        "diagnosis": [],
        "acceptance": acceptance(findings, traces, finalists),
        "interference": None,
        "capacity": capacity(findings, traces, finalists),
        "selftest": None,
        "search_cost": search_cost(findings, store, confirm_requests),
    }


def _workload(findings: Findings, trace: Trace) -> dict[str, Any]:
    """The trace's summary. Token counts that it does not hold are those of the engine, over all requests that it answered with off."""
    found = trace.summary()
    unknown = [name for name in ("input_tokens", "output_tokens") if found[name]["p50"] is None]
    lengths = findings.lengths(trace.name, findings.primary_offs[0]) if unknown else {}
    if not lengths:
        return found
    counts = {name: percentiles(lengths[name]) for name in unknown}
    said = " and ".join(name.replace("_", " ") for name in unknown)
    return {**found, **counts, "notes": [*found["notes"], f"{said} are counts of the engine: the trace does not hold them"]}


def decision(findings: Findings, workload: Trace, finalists: Finalists) -> Decision:
    """The verdict of each group, and overall the fastest of those that may win."""
    trace = workload.name
    evidence = {config: findings.evidence(trace, config) for config in finalists.values()}
    groups = [(config, judge(found)) for config, found in evidence.items()]
    by_engine = tuple(_group_decision(findings, trace, config, judgement) for config, judgement in groups)
    allowed = [pair for pair in groups if findings.may_win(pair[0])]
    warnings = (*_drift_warnings(findings, trace), *_trial_warnings(findings, trace))
    if not allowed:
        breaches = [breach for config in findings.space.candidates if (breach := findings.breach(config))]
        if not breaches:
            reason = "no speculative configuration could be measured against a baseline; see the failed trials"
            return Decision(trace, "not_measurable", None, None, (reason,), warnings, by_engine=by_engine)
        off = findings.primary_offs[0]
        reasons = ("No speculative configuration that was measured keeps the limits (--slo) that off keeps.", *breaches)
        return Decision(trace, "skip", off, None, reasons, warnings, by_engine=by_engine, launch=_launch(findings, off, ()))
    config, judgement = min(allowed, key=lambda pair: findings.cost_of(trace, recommended(*pair)))
    chosen = recommended(config, judgement)
    costs = overhead_of(findings, trace, evidence[config])
    return Decision(
        trace=trace,
        verdict=judgement.verdict,
        config=chosen,
        speedup=_speedup(findings, judgement),
        reasons=(*judgement.reasons, *(costs.reasons() if costs else ())),
        warnings=(*judgement.warnings, *warnings),
        below_batch=judgement.below_batch,
        break_even_batch=judgement.break_even,
        k_by_batch_size=judgement.k_by_batch_size,
        launch=_launch(findings, chosen, judgement.k_by_batch_size),
        by_engine=by_engine,
        depth=depth(findings, workload, evidence[config], judgement),
    )


def acceptance(findings: Findings, traces: Mapping[str, Trace], finalists: Finalists) -> list[dict[str, Any]]:
    """Acceptance of each finalist by category, context and time, at the load of its confirmation with the most requests."""
    found = []
    for name in traces:
        for config in finalists.values():
            mine = [t for t in findings.trials if t.measured and t.config == config and t.load.trace == name]
            if not mine:
                continue
            trial = max(mine, key=lambda t: (t.stage == "confirm", t.load.mode == "trace", len(t.requests)))
            parts = breakdown(findings.records_of(trial), (trial.speculation or {}).get("tau"), config.k)
            found.append({"trace": name, "config": config.to_dict(), "load": trial.load.to_dict(), **parts.to_dict()})
    return found


def recommended(config: ServingConfig, judgement: Judgement) -> ServingConfig:
    """What to run: the finalist where it won, off otherwise."""
    return config if judgement.verdict in ("enable", "enable_below_batch") else config.off()


def replays_of(trial: Trial, trials: Sequence[Trial]) -> list[Trial]:
    """The measured replays of this trial's trace on its configuration, at the trace's own load, itself included."""
    if trial.load.mode != "trace" or not trial.measured:
        return []
    return [t for t in trials if t.measured and (t.config, t.load, t.requests) == (trial.config, trial.load, trial.requests)]


def public_trial(trial: Trial, quality: Mapping[str, Mapping[str, Any]], replays: Sequence[Trial]) -> dict[str, Any]:
    """A trial as `result.json` shows it: with its quantization's quality and, in open loop, with intervals over all `replays` of its
    trace, without the key that finds it again."""
    out = trial.to_dict()
    del out["key"]
    out["requests_indices"] = list(out.pop("requests"))
    if replays and trial.metrics:
        out["metrics"] = {**trial.metrics, **_over_replays(trial.metrics, [t.metrics for t in replays if t.metrics])}
    if trial.config.backend == "reference":
        out["quality"] = quality.get(quality_key(trial.config), trial.quality)
    return out


def _over_replays(own: Mapping[str, Any], replays: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The intervals of an open loop: of the mean over replays, beside this replay's own values."""
    found: dict[str, Any] = {"throughput_ci95": replay_interval([m["output_tokens_per_s"] for m in replays]).ci95}
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        if all(m[name] for m in replays):
            found[name] = {
                **own[name],
                **{f"{q}_ci95": replay_interval([m[name][q] for m in replays]).ci95 for q in ("p50", "p95")},
            }
    return found


def search_cost(findings: Findings, store: RunStore, confirm_requests: int) -> dict[str, Any]:
    """What the trials cost, runs before a resume included, and what the full grid would have cost.

    The grid is every server at every batch size with the confirmation's number of requests.
    """
    stages: dict[str, dict[str, float]] = {}
    per_request: dict[int, list[float]] = {}
    for trial in findings.trials:
        totals = stages.setdefault(trial.stage, {"seconds": 0.0, "gpu_seconds": 0.0, "loads": 0})
        totals["seconds"] += trial.cost["seconds"]
        totals["gpu_seconds"] += trial.cost["gpu_seconds"]
        totals["loads"] += 1
        if trial.measured and trial.load.concurrency:
            per_request.setdefault(trial.load.concurrency, []).append(trial.cost["seconds"] / len(trial.requests))
    sweep_s = sum(confirm_requests * sum(costs) / len(costs) for costs in per_request.values())
    return {
        "measured_s": sum(s["seconds"] for s in stages.values()),
        "server_starts": store.server_starts,
        "full_grid_estimated_s": len(findings.space.servers) * sweep_s,
        "stages": stages,
    }


def _trial_speedup(findings: Findings, trial: Trial) -> dict[str, Any] | None:
    """A closed-loop trial against its own off of the same stage, on the same requests; None for off and for what has no off."""
    off = findings.find(trial.config.off(), trial.load, trial.stage if trial.stage.startswith("confirm") else "baseline")
    if trial.config.variant == "off" or not trial.measured or trial.load.mode != "closed" or off is None:
        return None
    objective = findings.objectives[0]
    return pair([off], [trial], objective, findings.records_of).speedup.to_dict(objective)


def _group_decision(findings: Findings, trace: str, config: ServingConfig, judgement: Judgement) -> dict[str, Any]:
    note = (
        ()
        if findings.may_win(config)
        else (f"From {findings.settings.search_requests} search requests, not confirmed on more.",)
    )
    return {
        "group": group_label(config),
        "trace": trace,
        "verdict": judgement.verdict,
        "config": config.to_dict(),
        "speedup": _speedup(findings, judgement),
        "below_batch": judgement.below_batch,
        "break_even_batch": dict(judgement.break_even),
        "k_by_batch_size": [list(row) for row in judgement.k_by_batch_size],
        "reasons": [*judgement.reasons, *note],
        "warnings": list(judgement.warnings),
    }


def _speedup(findings: Findings, judgement: Judgement) -> dict[str, Any] | None:
    return judgement.speedup.to_dict(findings.objectives[0]) if judgement.speedup else None


def _launch(findings: Findings, config: ServingConfig, schedule: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """What to run: as a command, and as text for a container; `scheduled` where the engine can follow K by batch size itself."""
    plain = _launch_texts(findings, config)
    scheduled = None
    ks = {k for _, _, k in schedule}
    if len(ks) > 1 and max(ks) and config.backend in FOLLOWED_BY:
        extra = {**config.extra, "k_schedule": [list(row) for row in schedule]}
        following = replace(config, k=max(ks), extra=extra)
        if ADAPTERS[config.backend].supports(following, WorkloadFacts()) is None:
            scheduled = _launch_texts(findings, following)
    return {**plain, "scheduled": scheduled}


def _launch_texts(findings: Findings, config: ServingConfig) -> dict[str, Any]:
    adapter = ADAPTERS[config.backend]
    command = findings.settings.engines.get(config.backend, adapter.DEFAULT_COMMAND)
    launch = adapter.launch(config, port=8000, command=command, base_args=findings.settings.base_args.get(config.backend, ()))
    return {
        "command": shlex.join(launch.argv),
        "env": dict(launch.env),
        "files": dict(launch.files),
        "dockerfile": as_dockerfile(launch),
        "kubernetes": as_kubernetes(launch),
    }


def _drift_warnings(findings: Findings, trace: str) -> list[str]:
    warnings = []
    for off in findings.primary_offs:
        ratio = findings.drift(trace, off)
        if ratio and abs(ratio.value - 1) > DRIFT_LIMIT and (ratio.better or ratio.worse or ratio.ci95 is None):
            change = "faster" if ratio.value > 1 else "slower"
            warnings.append(
                f"The machine drifted: off was {abs(1 - 1 / ratio.value) * 100:.0f} % {change} at the end of the run than at "
                f"its start ({off.backend})."
            )
    return warnings


def _trial_warnings(findings: Findings, trace: str) -> list[str]:
    trials = [t for t in findings.trials if t.load.trace == trace]
    failed = [t for t in trials if t.state == "FAIL"]
    lines = [f"{len(failed)} trials failed; the first: {failed[0].config.label()}: {failed[0].reason}"] if failed else []
    return [*lines, *batch_size_warnings(trials), *grouped([t.warnings for t in trials])]


def batch_size_warnings(trials: Sequence[Trial]) -> list[str]:
    """That tau falls with the batch size, of the configuration where it falls most: sequences that share a step do not change what is
    drafted for each, so an engine for which it falls drafts or verifies otherwise there. `trials` of one trace."""
    taus: dict[ServingConfig, dict[int, Estimate]] = {}
    for trial in trials:
        if trial.measured and trial.load.concurrency and trial.config.k and "k_schedule" not in trial.config.extra:
            spec = trial.speculation or {}
            if spec.get("tau_ci95"):
                found = taus.setdefault(trial.config, {})
                found[trial.load.concurrency] = Estimate(spec["tau"], tuple(spec["tau_ci95"]))
    falls = []
    for config, by_batch in taus.items():
        few, many = min(by_batch), max(by_batch)
        high, low = by_batch[few], by_batch[many]
        if high.ci95 and low.ci95 and high.ci95[0] > low.ci95[1] and high.value > TAU_FALLS * low.value:
            text = f"tau of {config.label()} falls from {high.value:.2f} at batch size {few} to {low.value:.2f} at {many}"
            falls.append(
                (high.value / low.value, f"{text}: the engine drafts or verifies otherwise there, which is worth asking why")
            )
    return [max(falls)[1]] if falls else []


def grouped(warnings: Sequence[Sequence[str]]) -> list[str]:
    """One line for each kind of warning, a kind being what it says before its first figure; `warnings` of each trial."""
    kinds: dict[str, list[str]] = {}
    for of_trial in warnings:
        for warning in dict.fromkeys(of_trial):
            kinds.setdefault(re.split(r"\d", warning, maxsplit=1)[0], []).append(warning)
    return [found[0] if len(found) == 1 else f"{found[0]} ({len(found)} trials warn of this)" for found in kinds.values()]
