"""The main job: baseline, search, confirmation, decision. Reads top to bottom as it runs."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.registry import ADAPTERS
from backends.types import ServingConfig
from harness import evidence as ev
from harness.decide import BatchEvidence, Judgement, Ratio, judge
from harness.environment import environment
from harness.lab import Lab
from harness.progress import RunProgress
from harness.result_schema import validate
from harness.search import Cell, open_storage, search
from harness.settings import RunSettings
from harness.space import Space, group_key, group_label
from harness.statistics import paired_speedup
from harness.store import RunStore, Trial
from harness.types import Decision, Load
from workloads.types import Trace

DRIFT_LIMIT = 0.03
"""Change of the baseline between the first and the last measurement above which the report warns."""

SearchEvidence = dict[ServingConfig, tuple[BatchEvidence, ...]]


class Run:
    """One run of the main job over a resolved space. Everything measured is in the store before the next load starts."""

    def __init__(
        self, settings: RunSettings, space: Space, traces: Mapping[str, Trace], store: RunStore, progress: RunProgress
    ) -> None:
        self.settings = settings
        self.space = space
        self.traces = traces
        self.store = store
        self.progress = progress
        self.lab = Lab(settings, store, traces, progress)
        self.objectives = settings.objectives or ("e2e_p50",)
        self.parts = {name: split(trace, settings) for name, trace in traces.items()}
        self.began = time.monotonic()

    def execute(self) -> dict[str, Any]:
        """Run all stages and return `result.json`."""
        self.store.write_config(self.settings.to_dict())
        with self.lab:
            self._refuse_infeasible()
            self._baseline()
            self._search()
            finalists = self._finalists()
            self._confirm(finalists)
        result = self._result(finalists)
        validate(result)
        self.store.write_result(result)
        return result

    # --- stages ---

    def _refuse_infeasible(self) -> None:
        known = {t.key for t in self.store.trials}
        for config, reason in self.space.infeasible:
            load = Load(mode="closed", trace=next(iter(self.traces)), concurrency=self.space.batch_sizes[0])
            key = f"infeasible {config.to_dict()}"
            if key not in known:
                number = self.store.next_number()
                self.store.add(Trial(number, "INFEASIBLE", "search", config, load, key, "search", (), reason=reason))
                self.progress.note(f"not run: {config.label()}: {reason}")

    def _baseline(self) -> None:
        """Off first: at every batch size, and once at the trace's own load for the quantization the user runs."""
        self.progress.stage("baseline")
        for off in self.space.offs:
            for name in self.traces:
                for batch in self.space.batch_sizes:
                    self.lab.run(off, _closed(name, batch), self.parts[name].search, "baseline", "baseline")
                if off in self._primary_offs() and self._has_arrivals(name):
                    self.lab.run(off, self._open(name), self.parts[name].confirm, "baseline", "baseline")

    def _search(self) -> None:
        self.progress.stage("search")
        if not self.space.candidates:
            return
        deadline = None
        if self.settings.budget_s:
            deadline = self.began + self.settings.budget_s * 0.6  # the rest is for confirmation
        search(
            self.space,
            self._measure_cell,
            strategy=self.settings.strategy,
            seed=self.settings.seed,
            objectives=len(self.objectives),
            storage=open_storage(self.settings.storage, self.store.directory),
            max_cells=self.settings.max_trials,
            deadline_s=deadline,
        )

    def _measure_cell(self, cell: Cell) -> tuple[float, ...] | None:
        """Mean over the traces of each objective's log ratio to the baseline; None if any trace could not be measured."""
        rows: list[list[float]] = []
        for name in self.traces:
            load, indices = _closed(name, cell.batch_size), self.parts[name].search
            trial = self.lab.run(cell.config, load, indices, "search", "search")
            baseline = self.lab.known(self._yardstick(cell.config), load, indices, "baseline")
            if not trial.measured or baseline is None:
                return None
            values = [ev.log_ratio(trial, baseline, objective) for objective in self.objectives]
            if None in values:
                return None
            rows.append([value for value in values if value is not None])
        self._show_best()
        return tuple(sum(column) / len(column) for column in zip(*rows, strict=True))

    def _finalists(self) -> dict[tuple[str, ...], ServingConfig]:
        """Of each group (engine, quantization) the configuration with the best score over the traces' own batch sizes."""
        evidence = {name: self._search_evidence(name) for name in self.traces}
        weights = {name: self._weights(name) for name in self.traces}
        best: dict[tuple[str, ...], tuple[float, ServingConfig]] = {}
        for config in self.space.candidates:
            total = sum(ev.score(evidence[name].get(config, ()), weights[name]) for name in self.traces)
            held = best.get(group_key(config))
            if total == float("-inf") or not self._meets_slo(config):
                continue
            # Within 1 % the smaller K wins: candidates come in ascending K.
            if held is None or total > held[0] + 0.01 * len(self.traces):
                best[group_key(config)] = (total, config)
        return {key: config for key, (_, config) in best.items()}

    def _meets_slo(self, config: ServingConfig) -> bool:
        """Whether no search trial of this configuration broke a limit the user set."""
        trials = [t for t in self.store.trials if t.measured and t.config == config and t.stage == "search"]
        for name, limit_s in self.settings.slo.items():
            metric, percentile = name.rsplit("_", 1)
            for trial in trials:
                summary = trial.metrics[f"{metric}_s"] if trial.metrics else None
                if summary and summary[percentile] > limit_s:
                    return False
        return True

    def _confirm(self, finalists: Mapping[tuple[str, ...], ServingConfig]) -> None:
        """The finalist of each engine at the quantization the user runs, then off again, on more requests."""
        self.progress.stage("confirm")
        for config in finalists.values():
            if config.off() not in self._primary_offs():
                continue
            for server in (config, config.off()):
                for name in self.traces:
                    for batch in self.space.batch_sizes:
                        self.lab.run(server, _closed(name, batch), self.parts[name].confirm, "confirm", "confirm")
                    if server is config and self._has_arrivals(name):
                        self.lab.run(server, self._open(name), self.parts[name].confirm, "confirm", "confirm")
            for name in self.traces:  # off last, on the very requests it was first measured on: the drift
                load = _closed(name, self.space.batch_sizes[-1])
                self.lab.run(config.off(), load, self.parts[name].search, "baseline", "baseline_last")

    # --- what the stages need ---

    def _primary_offs(self) -> list[ServingConfig]:
        """Off of each engine at the first quantization: the one the user runs."""
        first: dict[str, ServingConfig] = {}
        for off in self.space.offs:
            first.setdefault(off.backend, off)
        return list(first.values())

    def _yardstick(self, config: ServingConfig) -> ServingConfig:
        """The baseline a cell's value is relative to: its own off, or one for all where the user named what is best."""
        return self._primary_offs()[0] if self.settings.objectives else config.off()

    def _has_arrivals(self, name: str) -> bool:
        return all(r.arrival_s is not None for r in self.traces[name].requests())

    def _open(self, name: str) -> Load:
        return Load(mode="trace", trace=name, time_scale=self.settings.time_scale)

    def _search_evidence(self, trace: str) -> SearchEvidence:
        rows = {
            config: ev.by_batch(
                self.store.trials, trace, config, ("baseline", "search"), self.objectives[0], self.store.records
            )
            for config in self.space.candidates
        }
        return {config: evidence for config, evidence in rows.items() if evidence}

    def _shares(self, trace: str) -> dict[int, float]:
        """The trace's own batch sizes with off at its own load; empty where it has no arrivals."""
        for off in self._primary_offs():
            trial = self.lab.known(off, self._open(trace), self.parts[trace].confirm, "baseline")
            if trial:
                return ev.batch_shares(self.store.records(trial))
        return {}

    def _weights(self, trace: str) -> dict[int, float]:
        return ev.weights_of(self._shares(trace), self.space.batch_sizes)

    def _show_best(self) -> None:
        finalists = self._finalists()
        if finalists:
            self.progress.best(", ".join(c.label() for c in finalists.values()))

    # --- result ---

    def _result(self, finalists: Mapping[tuple[str, ...], ServingConfig]) -> dict[str, Any]:
        return {
            "schema": 1,
            "workloads": [trace.summary() for trace in self.traces.values()],
            "environment": environment(),
            "trials": [public_trial(t) for t in self.store.trials],
            "predictions": [],
            "decisions": [self._decision(name, finalists).to_dict() for name in self.traces],
            "preflight": [],
            "losslessness": [],
            "diagnosis": [],
            "interference": None,
            "capacity": None,
            "selftest": None,
            "search_cost": self._search_cost(),
        }

    def _decision(self, trace: str, finalists: Mapping[tuple[str, ...], ServingConfig]) -> Decision:
        shares = self._shares(trace)
        search_evidence = self._search_evidence(trace)
        groups: list[tuple[ServingConfig, Judgement]] = []
        for config in finalists.values():
            found = ev.evidence_of(
                config,
                self.store.trials,
                trace,
                objective=self.objectives[0],
                search_evidence=search_evidence,
                shares=shares,
                records_of=self.store.records,
            )
            groups.append((config, judge(found)))
        by_engine = tuple(self._engine_decision(trace, config, judgement) for config, judgement in groups)
        allowed = [(c, j) for c, j in groups if c.off() in self._primary_offs()]
        if not allowed:
            reason = "no speculative configuration could be measured against a baseline; see the failed trials"
            return Decision(trace, "not_measurable", None, None, (reason,), by_engine=by_engine)
        config, judgement = max(allowed, key=lambda pair: pair[1].speedup.value if pair[1].speedup else 0.0)
        chosen = config if judgement.verdict in ("enable", "enable_below_batch") else config.off()
        return Decision(
            trace=trace,
            verdict=judgement.verdict,
            config=chosen,
            speedup=judgement.speedup.to_dict(self.objectives[0]) if judgement.speedup else None,
            reasons=judgement.reasons,
            warnings=(*judgement.warnings, *self._drift_warnings(trace), *self._trial_warnings(trace)),
            below_batch=judgement.below_batch,
            break_even_batch=judgement.break_even,
            k_by_batch_size=judgement.k_by_batch_size,
            launch=self._launch(chosen),
            by_engine=by_engine,
        )

    def _engine_decision(self, trace: str, config: ServingConfig, judgement: Judgement) -> dict[str, Any]:
        confirmed = config.off() in self._primary_offs()
        note = () if confirmed else (f"From {self.settings.search_requests} search requests; not confirmed on more.",)
        return {
            "group": group_label(config),
            "trace": trace,
            "verdict": judgement.verdict,
            "config": config.to_dict(),
            "speedup": judgement.speedup.to_dict(self.objectives[0]) if judgement.speedup else None,
            "below_batch": judgement.below_batch,
            "break_even_batch": dict(judgement.break_even),
            "k_by_batch_size": [list(row) for row in judgement.k_by_batch_size],
            "reasons": [*judgement.reasons, *note],
            "warnings": list(judgement.warnings),
        }

    def _launch(self, config: ServingConfig) -> dict[str, Any]:
        adapter = ADAPTERS[config.backend]
        command = self.settings.engines.get(config.backend, adapter.DEFAULT_COMMAND)
        launch = adapter.launch(config, port=8000, command=command, base_args=self.settings.base_args)
        return {"command": shlex.join(launch.argv), "env": dict(launch.env), "files": dict(launch.files)}

    def _drift_warnings(self, trace: str) -> list[str]:
        load = _closed(trace, self.space.batch_sizes[-1])
        warnings = []
        for off in self._primary_offs():
            first, last = (self._baseline_at(off, load, stage) for stage in ("baseline", "baseline_last"))
            if first is None or last is None:
                continue
            drift = paired_speedup(self.store.records(first), self.store.records(last), "e2e_s", 0.5)
            ratio = Ratio(drift.value, drift.ci95)
            if abs(ratio.value - 1) > DRIFT_LIMIT and (ratio.better or ratio.worse or ratio.ci95 is None):
                warnings.append(
                    f"The machine drifted: off was {abs(1 - 1 / ratio.value) * 100:.0f} % "
                    f"{'faster' if ratio.value > 1 else 'slower'} at the end than at the start of the run ({off.backend})."
                )
        return warnings

    def _baseline_at(self, off: ServingConfig, load: Load, stage: str) -> Trial | None:
        return self.lab.known(off, load, self.parts[load.trace].search, stage)

    def _trial_warnings(self, trace: str) -> list[str]:
        failed = [t for t in self.store.trials if t.state == "FAIL" and t.load.trace == trace]
        lines = [f"{len(failed)} trials failed; the first: {failed[0].config.label()}: {failed[0].reason}"] if failed else []
        return lines + list(dict.fromkeys(w for t in self.store.trials if t.load.trace == trace for w in t.warnings))

    def _search_cost(self) -> dict[str, Any]:
        """What this directory's trials cost, runs before a resume included, and what the full grid would have cost.

        The grid is every server at every batch size with the confirmation's number of requests and one start each.
        """
        stages: dict[str, dict[str, float]] = {}
        per_request: dict[int, list[float]] = {}
        for trial in self.store.trials:
            totals = stages.setdefault(trial.stage, {"seconds": 0.0, "gpu_seconds": 0.0, "loads": 0})
            totals["seconds"] += trial.cost["seconds"]
            totals["gpu_seconds"] += trial.cost["gpu_seconds"]
            totals["loads"] += 1
            if trial.measured and trial.load.concurrency:
                per_request.setdefault(trial.load.concurrency, []).append(trial.cost["seconds"] / len(trial.requests))
        requests = sum(len(part.confirm) for part in self.parts.values())
        sweep_s = sum(requests * sum(costs) / len(costs) for costs in per_request.values())
        return {
            "measured_s": sum(s["seconds"] for s in stages.values()),
            "server_starts": self.store.server_starts,
            "full_grid_estimated_s": len(self.space.servers) * sweep_s,
            "stages": stages,
        }


@dataclass(frozen=True, slots=True)
class Parts:
    """Which requests of a trace search trials send, and which confirmation and baseline send."""

    search: tuple[int, ...]
    confirm: tuple[int, ...]


def split(trace: Trace, settings: RunSettings) -> Parts:
    """A representative part for cheap trials and a larger one for confirmation, disjoint where the trace is long enough."""
    search = representative(trace, settings.search_requests, seed=settings.seed)
    rest = hold_out(trace, search, settings.confirm_requests, seed=settings.seed)
    return Parts(tuple(search), tuple(rest))


def public_trial(trial: Trial) -> dict[str, Any]:
    """A trial as `result.json` shows it: the key that finds it again stays inside."""
    out = trial.to_dict()
    del out["key"]
    out["requests_indices"] = list(out.pop("requests"))
    return out


def _closed(trace: str, concurrency: int) -> Load:
    return Load(mode="closed", trace=trace, concurrency=concurrency)
