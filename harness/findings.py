"""What the trials of a run say so far: evidence, finalists, weights. Reads trials, measures nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from backends.types import ServingConfig
from harness import evidence as ev
from harness.decide import BatchEvidence, Evidence, Ratio
from harness.quality import quality_key
from harness.settings import RunSettings
from harness.space import Space, group_key
from harness.statistics import Array, column, paired_speedup
from harness.store import Trial
from harness.types import Load

Finalists = Mapping[tuple[str, ...], ServingConfig]


@dataclass(slots=True)
class Findings:
    """Views of `trials`, which grows while the run goes on."""

    settings: RunSettings
    space: Space
    records_of: ev.RecordsOf
    trials: list[Trial] = field(default_factory=list)
    quality: dict[str, dict[str, Any]] = field(default_factory=dict)  # quality key -> against what the user runs
    estimates: dict[tuple[ServingConfig, int, str], float] = field(default_factory=dict)  # the funnel's speed-up of cells

    @property
    def objectives(self) -> tuple[str, ...]:
        return self.settings.objectives or ("e2e_p50",)

    @property
    def primary_offs(self) -> list[ServingConfig]:
        """Off of each engine at the first quantization and KV cache type: what the user runs."""
        first: dict[str, ServingConfig] = {}
        for off in self.space.offs:
            first.setdefault(off.backend, off)
        return list(first.values())

    def find(self, config: ServingConfig, load: Load, stage: str) -> Trial | None:
        return next((t for t in self.trials if t.measured and t.config == config and t.load == load and t.stage == stage), None)

    def cell_values(self, trial: Trial) -> tuple[float, ...] | None:
        """Each objective's log ratio to the baseline at the same load; None where either was not measured.

        Relative to the trial's own off, or to one off for all where the user named what is best.
        """
        yardstick = self.primary_offs[0] if self.settings.objectives else trial.config.off()
        baseline = self.find(yardstick, trial.load, "baseline")
        if not trial.measured or baseline is None:
            return None
        values = [ev.log_ratio(trial, baseline, objective) for objective in self.objectives]
        return None if None in values else tuple(v for v in values if v is not None)

    def search_evidence(self, trace: str) -> dict[ServingConfig, tuple[BatchEvidence, ...]]:
        """Every candidate that the search measured, against its off, by batch size."""
        rows = {
            config: ev.by_batch(self.trials, trace, config, ("baseline", "search"), self.objectives[0], self.records_of)
            for config in self.space.candidates
        }
        return {
            config: tuple(self._with_estimate(trace, config, row) for row in evidence)
            for config, evidence in rows.items()
            if evidence
        }

    def _with_estimate(self, trace: str, config: ServingConfig, row: BatchEvidence) -> BatchEvidence:
        """The funnel's loads are short: its estimate from all of them says more of a cell than the cell's own few requests."""
        estimate = self.estimates.get((config, row.batch_size, trace))
        return row if estimate is None else replace(row, speedup=Ratio(estimate, None))

    def evidence(self, trace: str, finalist: ServingConfig) -> Evidence:
        return ev.evidence_of(
            finalist,
            self.trials,
            trace,
            objective=self.objectives[0],
            search_evidence=self.search_evidence(trace),
            estimates={(config, batch): value for (config, batch, name), value in self.estimates.items() if name == trace},
            shares=self.shares(trace),
            drift=max(drift.value, 1 / drift.value) if (drift := self.drift(trace, finalist.off())) else 1.0,
            records_of=self.records_of,
        )

    def lengths(self, trace: str, off: ServingConfig) -> dict[str, Array]:
        """Input and output tokens, as the engine counted them, of all requests of a trace that `off` answered, each once, in the
        trace's order; NaN where it did not say. Empty where nothing was measured."""
        tables = [self.records_of(t) for t in self.trials if t.measured and t.config == off and t.load.trace == trace]
        if not tables:
            return {}
        _, first = np.unique(np.concatenate([column(table, "index") for table in tables]), return_index=True)
        names = ("input_tokens", "output_tokens")
        return {name: np.concatenate([column(table, name) for table in tables])[first] for name in names}

    def drift(self, trace: str, off: ServingConfig) -> Ratio | None:
        """Off's E2E p50 at the start of the run ÷ at its end, on the same requests; None where it was not measured twice."""
        load = closed_load(trace, self.space.batch_sizes[-1])
        first, last = (self.find(off, load, stage) for stage in ("baseline", "baseline_last"))
        if first is None or last is None:
            return None
        found = paired_speedup(self.records_of(first), self.records_of(last), "e2e_s", 0.5)
        return Ratio(found.value, found.ci95) if math.isfinite(found.value) else None

    def shares(self, trace: str) -> dict[int, float]:
        """The trace's own batch sizes with off at its own load; empty where it has no arrivals."""
        for off in self.primary_offs:
            trial = self.find(off, open_load(trace, self.settings), "baseline")
            if trial:
                return ev.batch_shares(self.records_of(trial))
        return {}

    def weights(self, trace: str) -> dict[int, float]:
        return ev.weights_of(self.shares(trace), self.space.batch_sizes)

    def finalists(self, traces: Sequence[str]) -> dict[tuple[str, ...], ServingConfig]:
        """Of each group (engine, quantization) the configuration with the best score over the traces' own batch sizes."""
        evidence = {name: self.search_evidence(name) for name in traces}
        weights = {name: self.weights(name) for name in traces}
        best: dict[tuple[str, ...], tuple[float, ServingConfig]] = {}
        for config in self.space.candidates:
            total = sum(ev.score(evidence[name].get(config, ()), weights[name]) for name in traces)
            held = best.get(group_key(config))
            if total == float("-inf") or self.breach(config):
                continue
            # Within 1 % the smaller K wins: candidates come in ascending K.
            if held is None or total > held[0] + 0.01 * len(traces):
                best[group_key(config)] = (total, config)
        return {key: config for key, (_, config) in best.items()}

    def may_win(self, config: ServingConfig) -> bool:
        """The quantization and KV cache type the user runs, or those whose measured quality loss the user accepts."""
        if config.off() in self.primary_offs:
            return True
        measured = self.quality.get(quality_key(config)) if config.backend == "reference" else None
        return measured is not None and 1 - measured["greedy_agreement"] <= self.settings.max_quality_loss

    def cost_of(self, trace: str, config: ServingConfig) -> float:
        """Mean log E2E p50 over the trace's batch sizes: what engines and quantizations are compared by. inf where not measured."""
        total = 0.0
        for batch, weight in self.weights(trace).items():
            trials = [t for t in self.trials if t.measured and t.config == config and t.load == closed_load(trace, batch)]
            if not trials or trials[-1].metrics is None:
                return math.inf
            total += weight * math.log(trials[-1].metrics["e2e_s"]["p50"])
        return total

    def breach(self, config: ServingConfig) -> str | None:
        """Where a search trial of this configuration broke a limit the user set, in words; None where none did.

        A load at which off breaks the same limit is too much for the server, which says nothing against speculation.
        """
        for trial in self.trials:
            if trial.config != config or trial.stage != "search":
                continue
            off = self.find(config.off(), trial.load, "baseline")
            for name in sorted(self._broken(trial) - self._broken(off)):
                took = " while off took ".join(f"{_limited(t.metrics, name):.3g} s" for t in (trial, off) if t and t.metrics)
                limit = f"the limit is {self.settings.slo[name]:g} s"
                return f"{config.label()} breaks {name} at batch size {trial.load.concurrency}: {took}; {limit}"
        return None

    def _broken(self, trial: Trial | None) -> set[str]:
        """Limits that a trial did not meet; none where it was not measured."""
        if trial is None or trial.metrics is None:
            return set()
        broken = set()
        for name, limit_s in self.settings.slo.items():
            value = _limited(trial.metrics, name)
            if value is not None and value > limit_s:
                broken.add(name)
        return broken


def _limited(metrics: Mapping[str, Any], name: str) -> float | None:
    """The measured value that the limit `name` ("e2e_p95") is on, in seconds."""
    metric, percentile = name.rsplit("_", 1)
    summary = metrics[f"{metric}_s"]
    return summary[percentile] if summary else None


def closed_load(trace: str, concurrency: int) -> Load:
    return Load(mode="closed", trace=trace, concurrency=concurrency)


def open_load(trace: str, settings: RunSettings) -> Load:
    return Load(mode="trace", trace=trace, time_scale=settings.time_scale)
