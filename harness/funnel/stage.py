"""The funnel as a stage of the main job: trials of the lab become observations, and what the funnel finds goes back to the findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from backends.matchers import DEFAULT_MAX_N, DEFAULT_MIN_N
from backends.types import ServingConfig
from harness.findings import Findings, closed_load
from harness.funnel import prune
from harness.funnel.acceptance import Curve, DraftKey, draft_key, from_recorded
from harness.funnel.confirm import Confirmed, confirm
from harness.funnel.observation import Observation, Workload
from harness.funnel.prediction import break_even
from harness.funnel.search import Funnel, Planned, Pruned
from harness.lab import Lab, Wanted
from harness.offline import pool
from harness.progress import RunProgress
from harness.recorded import offline_acceptance
from harness.search import Cell, CellStudy
from harness.settings import RunSettings
from harness.space import Space, group_key, group_label
from harness.statistics import column
from harness.store import RunStore, Trial
from workloads.types import Trace

MIN_REQUESTS = 4


def observe(trial: Trial, records: pa.Table) -> Observation | None:
    """A measured closed-loop trial as the funnel sees it; None where the engine does not say what the funnel needs."""
    if not trial.measured or trial.speculation is None or trial.metrics is None or not trial.load.concurrency:
        return None
    tau = 1.0 if trial.config.variant == "off" else trial.speculation["tau"]
    ttft, e2e, inputs, outputs = (column(records, name) for name in ("ttft_s", "e2e_s", "input_tokens", "output_tokens"))
    good = ~np.isnan(ttft) & ~np.isnan(e2e) & ~np.isnan(inputs) & (outputs > 1)  # NaN compares as False
    if tau is None or good.sum() < MIN_REQUESTS:
        return None
    steps, drafted = trial.speculation["verify_steps"], trial.speculation["drafted_steps"]
    return Observation(
        config=trial.config,
        batch_size=trial.load.concurrency,
        workload=trial.load.trace,
        requests=tuple(int(i) for i in column(records, "index")[good]),
        input_tokens=inputs[good],
        output_tokens=outputs[good],
        ttft_s=ttft[good],
        e2e_s=e2e[good],
        tau=float(tau),
        position_rates=tuple(trial.speculation["position_rates"]),
        drafted_share=drafted / steps if steps and drafted is not None else 1.0,
        prefix_hit_rate=trial.metrics["prefix_hit_rate"] or 0.0,
        cost_s=trial.cost["seconds"],
    )


@dataclass(slots=True)
class FunnelStage:
    """The funnels of all groups (engine, quantization). `search` may be followed by `confirm` of each group."""

    settings: RunSettings
    space: Space
    findings: Findings
    lab: Lab
    parts: Mapping[str, Any]  # trace -> its `search` and `confirm` requests
    store: RunStore
    progress: RunProgress
    study: Callable[[Sequence[Cell]], CellStudy]
    traces: Mapping[str, Trace] = field(default_factory=dict)
    stop: Callable[[], bool] = lambda: False
    funnels: dict[tuple[str, ...], Funnel] = field(default_factory=dict)
    confirmed: dict[tuple[str, ...], Confirmed] = field(default_factory=dict)
    _studies: dict[tuple[str, ...], CellStudy] = field(default_factory=dict)

    def search(self) -> list[ServingConfig]:
        """Run the funnel of every group. Returns the candidates of groups whose engine does not say enough for it."""
        left: list[ServingConfig] = []
        for off in self.space.offs:
            candidates = [c for c in self.space.candidates if group_key(c) == group_key(off)]
            loads = [load for batch in self.space.batch_sizes for load in self._baseline(off, batch)]
            if not candidates or {(o.batch_size, o.workload) for o in loads} != {
                (b, name) for b in self.space.batch_sizes for name in self.parts
            }:
                left += candidates
                continue
            self._search_group(off, candidates, loads)
        return left

    def _recall(self, candidates: Sequence[ServingConfig]) -> list[Observation]:
        """Loads of an earlier run in this directory with another space, as far as they still hold."""
        cells: dict[tuple[ServingConfig, int], dict[str, Trial]] = {}
        for trial in self.lab.recall("search"):
            if trial.config in candidates and trial.load.concurrency in self.space.batch_sizes:
                cells.setdefault((trial.config, trial.load.concurrency), {})[trial.load.trace] = trial
        loads: list[Observation] = []
        for (config, batch), trials in cells.items():
            found = [observe(trial, self.findings.records_of(trial)) for trial in trials.values()]
            known = [load for load in found if load is not None]
            if len(known) == len(self.parts):
                self._tell(config, batch, "search", self._values(list(trials.values())))
                loads += known
        return loads

    def _search_group(self, off: ServingConfig, candidates: Sequence[ServingConfig], loads: list[Observation]) -> None:
        key = group_key(off)
        study = self._studies[key] = self.study([Cell(c, batch) for c in candidates for batch in self.space.batch_sizes])
        if study.fresh:  # else this run goes on, and comes by what it measured in the same order as before
            loads = [*loads, *self._recall(candidates)]
        funnel = self.funnels[key] = Funnel(
            off=off,
            candidates=candidates,
            workloads=[self._workload(name, off, loads) for name in self.parts],
            measure=self._measure,
            loads=loads,
            recorded=self._curves(candidates),
            slo=self.settings.slo,
            kv_cache_tokens=self._kv_cache_tokens(off),
            judge=self.findings.breach,
            stop=self.stop,
            on_prune=self._on_prune,
            together=len(self.lab.slots),
            ahead=self._ahead,
        )
        for objective in self.findings.objectives:
            funnel.objective = objective
            funnel.run()
        funnel.objective = self.findings.objectives[0]
        funnel.predict_all()
        self._note_estimates(funnel)

    def _note_estimates(self, funnel: Funnel) -> None:
        for name in self.parts:
            self.findings.estimates.update(
                {(config, batch, name): math.exp(mean) for (config, batch), (mean, _) in funnel.speedups(name).items()}
            )

    def finalists(self) -> dict[tuple[str, ...], ServingConfig]:
        """Of each group the configuration to judge: confirmed, else the search's best; also where off is better."""
        found = {}
        for key in self.funnels:
            confirmed = self.confirmed.get(key)
            ranked = self.ranked(key)
            if confirmed and confirmed.winner.k:
                found[key] = confirmed.winner
            elif ranked:
                found[key] = ranked[0]
        return found

    def confirm(self, key: tuple[str, ...], after: Callable[[ServingConfig], None]) -> None:
        """Confirm one group's finalists against off; `after` is called once for each server, while it runs."""
        funnel = self.funnels[key]
        finalists = self.ranked(key)
        if not finalists:
            return
        self.confirmed[key] = confirm(
            funnel,
            finalists,
            lambda batch: self.settings.confirm_requests,
            least_weight=0.0,  # the verdict and the schedule need every batch size
            side_by_side=self._side_by_side,
            after=after,
        )
        self._note_estimates(funnel)

    def result(self) -> list[dict[str, Any]]:
        """What each funnel found, for `result.json`. All but the loads and the confirmation is predicted."""
        return [self._group_result(key, funnel) for key, funnel in self.funnels.items()]

    def predictions(self) -> list[dict[str, Any]]:
        """Every cell as it was predicted when the probes were done, beside the trial that measured it later."""
        rows = []
        for funnel in self.funnels.values():
            for (config, batch, name), found in funnel.first_grid.items():
                load = closed_load(name, batch)
                measured = self.findings.find(config, load, "search") or self.findings.find(config, load, "baseline")
                rows.append(
                    {
                        "config": config.to_dict(),
                        "load": load.to_dict(),
                        "tau": found.tau,
                        "e2e_p50_s": found.e2e_p50_s,
                        "output_tokens_per_s": found.output_tokens_per_s,
                        "measured_in_trial": measured.number if measured else None,
                    }
                )
        return rows

    def ranked(self, key: tuple[str, ...]) -> list[ServingConfig]:
        """The finalists; where off is best beyond doubt the best that was measured, so that this is confirmed too."""
        funnel = self.funnels[key]
        finalists = [config for config in funnel.finalists if config.k]
        measured = {load.config for load in funnel.loads if load.config.k}
        rest = sorted(measured & set(funnel.scores.configs), key=lambda config: -funnel.scores.of(config)[0])
        return finalists or rest[:1] or list(measured)[:1]

    # Measuring.

    def _side_by_side(self, configs: Sequence[ServingConfig], batches: Sequence[int], stage: str) -> bool:
        """`funnel.confirm` asks; the numbers of requests do not matter in a confirmation."""
        return self.lab.side_by_side(
            [self._wanted(c, b, stage, 0, name) for c in configs for b in batches for name in self.parts]
        )

    def _measure(self, config: ServingConfig, batch: int, stage: str, count: int) -> Mapping[str, Observation] | None:
        found: dict[str, Observation] = {}
        trials = []
        for name in self.parts:
            trial = self.lab.run(*self._wanted(config, batch, stage, count, name))
            load = observe(trial, self.findings.records_of(trial)) if trial.measured else None
            if load is None:
                self._tell(config, batch, stage, None)
                return None
            if prune.accepts_everything(load):
                self.progress.note(
                    f"  every draft token was accepted (tau {load.tau:.2f}): greedy text equals off's, so it copies"
                )
            found[name] = load
            trials.append(trial)
        self._tell(config, batch, stage, self._values(trials))
        return found

    def _wanted(self, config: ServingConfig, batch: int, stage: str, count: int, name: str) -> Wanted:
        load, parts = closed_load(name, batch), self.parts[name]
        if stage.startswith("confirm"):
            return Wanted(config, load, parts.confirm, "confirm", "confirm" if stage == "confirm1" else stage)
        return Wanted(config, load, self._subset(parts.search, batch, count), "search", stage)

    def _ahead(self, servers: Sequence[Sequence[Planned]]) -> None:
        def wanted_of(load: Planned) -> Iterator[Wanted]:
            for name in self.parts:
                yield self._wanted(load.config, load.batch_size, "search", load.requests, name)

        for _ in self.lab.ahead((takewhile(lambda _: not self.stop(), loads) for loads in servers), wanted_of):
            pass  # `_measure` finds them

    def _values(self, trials: Sequence[Trial]) -> tuple[float, ...] | None:
        """Mean over the traces of each objective's log ratio to the baseline."""
        values = [self.findings.cell_values(trial) for trial in trials]
        known = [value for value in values if value is not None]
        return tuple(np.mean(known, axis=0).tolist()) if len(known) == len(values) else None

    def _tell(self, config: ServingConfig, batch: int, stage: str, values: tuple[float, ...] | None) -> None:
        if stage == "search" and config.k:
            self._studies[group_key(config)].record(Cell(config, batch), values)

    def _subset(self, requests: Sequence[int], batch: int, count: int) -> tuple[int, ...]:
        """`count` of them, others for each batch size, so that small loads do not all hang on the same few; fewer are always a part
        of more."""
        order = np.random.default_rng([self.settings.seed, batch]).permutation(len(requests))
        return tuple(sorted(requests[i] for i in order[:count]))

    def _baseline(self, off: ServingConfig, batch: int) -> list[Observation]:
        trials = [self.findings.find(off, closed_load(name, batch), "baseline") for name in self.parts]
        found = [observe(trial, self.findings.records_of(trial)) for trial in trials if trial is not None]
        return [load for load in found if load is not None]

    def _kv_cache_tokens(self, off: ServingConfig) -> int | None:
        said = [t.engine["kv_cache_tokens"] for t in self.findings.trials if t.config == off and t.measured and t.engine]
        return said[-1] if said else None

    def _workload(self, name: str, off: ServingConfig, loads: Sequence[Observation]) -> Workload:
        """Lengths of all requests that off answered, at the trace's own load too."""
        inputs, outputs = self.findings.lengths(name, off).values()
        good = (inputs >= 1) & (outputs > 1)  # NaN compares as False
        hits = [load.prefix_hit_rate for load in loads if load.workload == name]
        return Workload(
            name,
            tuple(inputs[good].astype(int).tolist()),
            tuple(outputs[good].astype(int).tolist()),
            float(np.mean(hits)),
            self.findings.weights(name),
        )

    def _curves(self, candidates: Sequence[ServingConfig]) -> dict[tuple[DraftKey, str], Curve]:
        """Exact acceptance from recorded outputs, for those drafters of the reference engine that read only the history."""
        lookups = [c for c in candidates if c.backend == "reference" and c.variant in ("ngram", "suffix")]
        found: dict[tuple[DraftKey, str], Curve] = {}
        if not lookups:
            return found
        deepest = max(config.k for config in lookups)
        for name, trace in self.traces.items():
            used = trace.select(sorted({*self.parts[name].search, *self.parts[name].confirm}))
            parts = pool(offline_acceptance(used, Path(lookups[0].model), max_k=deepest)) if used.known("output_text") else []
            for config in lookups:
                sizes = (DEFAULT_MIN_N, DEFAULT_MAX_N) if config.variant == "ngram" else (None, None)
                mine = [p for p in parts if (p.variant, p.min_n, p.max_n) == (config.variant, *sizes)]
                if mine:
                    found[draft_key(config), name] = from_recorded(mine)
        return found

    # Pruning.

    def _on_prune(self, pruned: Pruned) -> None:
        """What was measured of a pruned configuration stays a measurement; its state says that it was given up, and why."""
        self.progress.note(f"  pruned {pruned.config.label()}: {pruned.reason}")
        for i, trial in enumerate(self.findings.trials):
            if trial.config == pruned.config and trial.stage == "search" and trial.measured:
                self.findings.trials[i] = self.store.update(replace(trial, state="PRUNED", reason=pruned.reason))
        self._studies[group_key(pruned.config)].prune(pruned.config)

    # What was found.

    def _group_result(self, key: tuple[str, ...], funnel: Funnel) -> dict[str, Any]:
        cost = funnel.cost
        context = float(np.mean([load.context_tokens for load in funnel.loads]))
        confirmed = self.confirmed.get(key)
        return {
            "group": group_label(funnel.off),
            "step_cost": {
                "error": cost.error,
                "loads": cost.loads,
                "fixed_s": cost.fixed_s + cost.experts_s,
                "token_s": cost.token_s,
                "context_token_s": cost.context_token_s,
                "prefill_token_s": cost.prefill_token_s,
                "crossover_batch": cost.crossover_batch(0),
                "by_batch": [
                    {"batch_size": b, "step_s": cost.verify_s(b, 0, context), "memory_share": cost.memory_share(b, 0, context)}
                    for b in self.space.batch_sizes
                ],
            },
            "acceptance": [self._curve_result(funnel, name, configs) for name in self.parts for configs in funnel.drafters],
            "pruned": [{"config": p.config.to_dict(), "reason": p.reason} for p in funnel.pruned],
            "schedule": [self._schedule(funnel, name) for name in self.parts],
            "confirmation": {
                "rounds": confirmed.rounds,
                "clear": confirmed.clear,
                "winner": confirmed.winner.to_dict(),
                "speedups": [
                    {
                        "config": c.to_dict(),
                        "value": math.exp(e.value),
                        "ci95": [math.exp(x) for x in e.ci95] if e.ci95 else None,
                    }
                    for c, e in confirmed.speedups.items()
                    if math.isfinite(e.value)
                ],
            }
            if confirmed
            else None,
        }

    def _curve_result(self, funnel: Funnel, name: str, configs: Sequence[ServingConfig]) -> dict[str, Any]:
        curve = funnel.curve(draft_key(configs[0]), name)
        ks = [c.k for c in configs if curve and c.k <= len(curve.rates)]
        taus = {k: curve.tau(k) for k in ks} if curve else {}
        return {
            "trace": name,
            "config": configs[0].to_dict(),
            "tau": [{"k": k, "value": tau.value, "ci95": list(tau.ci95) if tau.ci95 else None} for k, tau in taus.items()],
            "position_rates": list(curve.rates) if curve else [],
            "gap": curve.gap if curve else None,
        }

    def _schedule(self, funnel: Funnel, name: str) -> dict[str, Any]:
        """The best configuration for each batch size, predicted and corrected by all loads, and where its gain ends."""
        speedups = funnel.speedups(name)
        rows = []
        for batch in self.space.batch_sizes:
            here = {config: value for (config, b), value in speedups.items() if b == batch}
            top = max((mean for mean, _ in here.values()), default=0.0)
            # Within 1 % the smaller K wins, off where nothing gains.
            config = min((c for c, (mean, _) in here.items() if mean >= top - 0.01), key=lambda c: c.k, default=funnel.off)
            mean, sd = here.get(config, (0.0, 0.0))
            if mean <= 0:
                config, mean, sd = funnel.off, 0.0, 0.0
            rows.append({"batch_size": batch, "config": config.to_dict(), "speedup": math.exp(mean), "sd": sd})
        best = next(iter(self.ranked(group_key(funnel.off))), None)
        curve = {b: value for (config, b), value in speedups.items() if config == best}
        return {"trace": name, "by_batch": rows, "break_even_batch": break_even(curve)}
