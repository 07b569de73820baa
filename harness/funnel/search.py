"""The acceptance-first funnel over one group of servers that differ in speculation alone.

Off is known at all batch sizes. Each drafter is probed once, at its largest K and two batch sizes; step costs are fitted, every cell
is predicted, and from there on the cell that is expected to gain most over the best so far is measured next, until no cell is expected
to gain more than the noise. A server that runs is used for all its batch sizes that matter before another one starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np

from backends.types import ServingConfig
from harness.funnel import prune
from harness.funnel.acceptance import Curve, DraftKey, draft_key, from_loads
from harness.funnel.calibration import Calibration, calibrate
from harness.funnel.observation import Measure, Observation, Workload
from harness.funnel.prediction import Grid, predict_grid, ratios
from harness.funnel.scores import Scores, score
from harness.funnel.step_cost import StepCost, fit

MARGIN, LEAST_GAIN = 0.01, 0.002
"""In log speed-up: what is not worth a search, and the expected gain beyond it below which nothing more is measured."""
FREE_SERVERS, FREE_SHARE = 3.0, 0.06
"""What may be spent, off included, before the least gain grows: servers measured at every batch size, or a share of all servers."""
MOST_SERVERS, MOST_SHARE = 12.0, 0.24
"""What may be spent, off included, with a further round of confirmation: servers, or a share of all servers."""
LEAST_WEIGHT = 0.04
"""Batch sizes that hold less of the trace's decode time are predicted, and measured only in confirmation."""
LOST, ALIKE = 0.02, 0.1
"""A configuration is given up when it is slower than the best by more than this on paired requests, in log, and their TTFT, compared
with what was predicted, differ by no more than that."""
MAX_FINALISTS = 2
PROBE_BATCH, PROBE_REQUESTS, LEAST_REQUESTS = 32, 64, 8
"""Acceptance is probed at this batch size, or the largest that matters if that is larger: tokens are cheap there."""


START_SHARE, MAX_REQUESTS = 0.2, 128
"""A load may have as many requests as take this share of a server's start: a short load saves nothing and is mostly noise."""


def requests_of(batch_size: int, least: int = LEAST_REQUESTS) -> int:
    """Requests of a load: one for each slot at least; the slots are filled before it and kept filled (`harness.replay`)."""
    return max(least, batch_size)


class Planned(NamedTuple):
    config: ServingConfig
    batch_size: int
    requests: int


@dataclass(frozen=True, slots=True)
class Pruned:
    config: ServingConfig
    reason: str


@dataclass(slots=True)
class Funnel:
    """State of the search of one group; `run` fills it.

    `measured` is told of every load, `stop` says that the budget is used up. Where `together` servers can be measured at once, `ahead`
    is told what will be measured next, by server, and measures it all.
    """

    off: ServingConfig
    candidates: Sequence[ServingConfig]
    workloads: Sequence[Workload]
    measure: Measure
    loads: list[Observation]  # off at every batch size, to begin with
    objective: str = "e2e_p50"
    recorded: Mapping[tuple[DraftKey, str], Curve] = field(default_factory=dict)  # exact, from recorded outputs
    slo: Mapping[str, float] = field(default_factory=dict)
    kv_cache_tokens: int | None = None  # as the engine said
    every_batch: bool = True  # predict every batch size after the probes, not only those that matter to the score
    judge: Callable[[ServingConfig], str | None] = lambda config: None  # after a load: why the configuration is out
    stop: Callable[[], bool] = lambda: False
    on_prune: Callable[[Pruned], None] = lambda pruned: None
    together: int = 1
    ahead: Callable[[Sequence[Sequence[Planned]]], None] = lambda servers: None
    pruned: list[Pruned] = field(default_factory=list)
    cost: StepCost = field(init=False)
    grid: Grid = field(default_factory=dict)
    first_grid: Grid = field(default_factory=dict)  # as predicted when the probes were done
    scores: Scores = field(init=False)
    calibration: Calibration = field(init=False)
    ratios: list[tuple[float, float]] = field(default_factory=list)  # measured ÷ predicted, by load, since the last fit
    _known: int = 0  # loads before this run

    def run(self) -> None:
        """Probe what was not probed yet, and measure what may gain. Again with another objective: earlier loads are kept."""
        self.cost = fit(self.loads)
        self._known = len(self.loads)
        self._probe()
        for _ in range(2):  # measured cells improve the fit, which may show another cell to measure
            self._predict(self._all_batches if self.every_batch and not self.first_grid else self.batch_sizes)
            self.first_grid = self.first_grid or self.grid
            if not self._measure_while_it_gains():
                break

    def predict_all(self) -> None:
        """Predictions for every batch size, from all loads: for those who want to see them."""
        self._predict(self._all_batches)

    def learn(self, loads: Sequence[Observation]) -> None:
        """Take in what was measured elsewhere, and predict and score again."""
        self.loads += loads
        self._predict(list(dict.fromkeys(batch for _, batch, _ in self.grid)))

    @property
    def batch_sizes(self) -> list[int]:
        """Batch sizes that are measured in the search."""
        return [b for b in self._all_batches if any(w.weights.get(b, 0.0) >= LEAST_WEIGHT for w in self.workloads)]

    @property
    def _all_batches(self) -> list[int]:
        return sorted({load.batch_size for load in self.loads if load.config == self.off})

    @property
    def finalists(self) -> list[ServingConfig]:
        """The best measured configuration and those that may yet be better, best first; empty where off is best beyond doubt."""
        best = self.incumbent()
        found = [best] if best.k else []
        return sorted([*found, *self.rivals(best)], key=lambda config: -self.scores.of(config)[0])[:MAX_FINALISTS]

    def rivals(self, of: ServingConfig) -> list[ServingConfig]:
        """Measured configurations that may yet turn out better than `of`, best first."""
        gains = self.scores.expected_gain(of, MARGIN)
        measured = {load.config for load in self.loads if load.config.k} - {of}
        found = [
            config for config, gain in zip(self.scores.configs, gains, strict=True)
            if gain > LEAST_GAIN and config in measured and not self._is_pruned(config)
        ]  # fmt: skip
        return sorted(found, key=lambda config: -self.scores.of(config)[0])

    def incumbent(self) -> ServingConfig:
        """The measured configuration with the best score, off included."""
        measured = {load.config for load in self.loads}
        known = [c for c in self.scores.configs if c in measured and not self._is_pruned(c)]
        return max(known, key=lambda config: self.scores.of(config)[0])

    # Probes.

    def _probe(self) -> None:
        given_up = {draft_key(entry.config) for entry in self.pruned}
        left = [
            configs
            for configs in self.drafters
            if (key := draft_key(configs[0])) not in given_up
            and not self._is_probed(configs)
            and not self._prune_unpromising(key, configs)
        ]
        self.ahead([self._probes_of(configs) for configs in left])
        for configs in left:
            if self.stop():
                return
            self._probe_drafter(draft_key(configs[0]), configs)

    def _is_probed(self, configs: Sequence[ServingConfig]) -> bool:
        """Whether loads are known that reach as deep as the largest K: of an earlier objective, or of an earlier run."""
        deepest = max(config.k for config in configs)
        measured = [load.config.k for load in self.loads if load.config.k and draft_key(load.config) == draft_key(configs[0])]
        return bool(measured) and max(measured) >= deepest

    @property
    def drafters(self) -> list[list[ServingConfig]]:
        """The candidates by drafter: each list differs in K alone."""
        found: dict[DraftKey, list[ServingConfig]] = {}
        for config in self.candidates:
            found.setdefault(draft_key(config), []).append(config)
        return list(found.values())

    def _probes_of(self, configs: Sequence[ServingConfig]) -> list[Planned]:
        """Its largest K at a batch size where tokens are cheap, and at the smallest that matters."""
        deepest = max(configs, key=lambda config: config.k)
        matter = self.batch_sizes
        wide = max([matter[-1], *(b for b in self._all_batches if b <= PROBE_BATCH)])
        least = {wide: PROBE_REQUESTS}
        return [Planned(deepest, b, self.requests(b, least.get(b, LEAST_REQUESTS))) for b in dict.fromkeys((wide, matter[0]))]

    def _probe_drafter(self, key: DraftKey, configs: Sequence[ServingConfig]) -> None:
        for probe in self._probes_of(configs):
            found = self._load(probe.config, probe.batch_size, probe.requests)
            if not found:
                return  # it does not run: no acceptance, no prediction
            reasons = [prune.dead(load) for load in found]
            if all(reasons):
                self._prune(configs, str(reasons[0]))
                return
            if self._prune_unpromising(key, configs):
                return

    def _prune_unpromising(self, key: DraftKey, configs: Sequence[ServingConfig]) -> bool:
        curves = [(workload, self.curve(key, workload.name)) for workload in self.workloads]
        deepest = max(config.k for config in configs)
        known = [(workload, curve) for workload, curve in curves if curve is not None and len(curve.rates) >= deepest]
        if len(known) < len(curves):
            return False
        context = float(np.mean([load.context_tokens for load in self.loads]))
        reason = prune.cannot_win(configs, self.cost, known, context, 0.0)
        if reason:
            self._prune(configs, reason)
        return reason is not None

    def curve(self, key: DraftKey, workload: str) -> Curve | None:
        loads = [load for load in self.loads if load.config.k and draft_key(load.config) == key and load.workload == workload]
        return from_loads(loads) if loads else self.recorded.get((key, workload))

    def _kept_hits(self, config: ServingConfig, workload: str) -> float:
        """Prefix-cache hits in the drafter's loads ÷ those of off at the same batch sizes: some engines lose hits with a draft."""
        here = [load for load in self.loads if load.workload == workload]
        offs = {load.batch_size: load.prefix_hit_rate for load in here if load.config == self.off}
        drafted = [load for load in here if draft_key(load.config) == draft_key(config)]
        plain = sum(offs.get(load.batch_size, load.prefix_hit_rate) for load in drafted)
        return min(sum(load.prefix_hit_rate for load in drafted) / plain, 1.0) if plain else 1.0

    def _curves(self) -> dict[tuple[DraftKey, str], Curve]:
        """Of every drafter and workload, as far as known."""
        keys = [draft_key(configs[0]) for configs in self.drafters]
        found = {(key, workload.name): self.curve(key, workload.name) for key in keys for workload in self.workloads}
        return {at: curve for at, curve in found.items() if curve is not None}

    def speedups(self, workload: str) -> dict[tuple[ServingConfig, int], tuple[float, float]]:
        """Log speed-up over off and its standard deviation for each cell: predicted, corrected by all loads."""
        rows, covariance = self.calibration.rows, self.calibration.covariance
        found = {}
        for (config, batch, name), on in self.grid.items():
            if name == workload and config.k:
                i, j = rows[config, batch], rows[self.off, batch]
                base = math.log(self.grid[self.off, batch, name].objective(self.objective) / on.objective(self.objective))
                variance = covariance[i, i] + covariance[j, j] - 2 * covariance[i, j]
                correction = self.calibration.mean[j] - self.calibration.mean[i]
                found[config, batch] = float(base + correction), math.sqrt(max(variance, 0.0))
        return found

    # Predicting and measuring.

    def _predict(self, batches: Sequence[int]) -> None:
        self.cost = fit(self.loads)
        alive = [self.off, *(c for c in self.candidates if not self._is_pruned(c))]
        acceptance = self._curves()
        self.ratios = []
        self.grid = predict_grid(
            alive,
            batches,
            self.workloads,
            self.cost,
            lambda config, workload: acceptance.get((draft_key(config), workload)),
            self._kept_hits,
            kv_cache_tokens=self.kv_cache_tokens,
            slo=self.slo,
        )
        self._rescore()

    def _rescore(self) -> None:
        cells = list(dict.fromkeys((config, batch) for config, batch, _ in self.grid))
        curves = self._curves()
        for load in self.loads[len(self.ratios) :]:
            curve = curves.get((draft_key(load.config), load.workload))
            self.ratios.append(ratios(load, self.cost, curve, kv_cache_tokens=self.kv_cache_tokens))
        self.calibration = calibrate(self.cost, self.loads, self.ratios, cells)
        self.scores = score(self.grid, self.calibration, self.workloads, self.off, curves, self.loads, self.objective)

    def _measure_while_it_gains(self) -> int:
        """Loads measured."""
        done, running = 0, None
        while not self.stop() and (servers := self._next(running)):
            self.ahead(servers)
            for config, batch, requests in chain.from_iterable(servers):
                if self._is_pruned(config):  # by its load before this one
                    continue
                running = config
                found = self._load(config, batch, requests)
                done += 1
                if not found:
                    self._prune([config], "could not be measured")
                    continue
                reason = self.judge(config)
                if reason:
                    self._prune([config], reason)
                self._rescore()
                self._compare_with_incumbent(config, batch)
        return done

    def _next(self, running: ServingConfig | None) -> list[list[Planned]]:
        """The load to measure: on the running server while it may gain, else on the server that is expected to gain most. Where several
        can run at once all loads that are open on the best ones."""
        gains = dict(zip(self.scores.configs, self.scores.expected_gain(self.incumbent(), MARGIN), strict=True))
        best, least = self.incumbent(), self._least_gain()
        open_cells: dict[ServingConfig, list[int]] = {}
        measured = {(load.config, load.batch_size) for load in self.loads}
        for config in self.scores.configs:
            left = [b for b in self.batch_sizes if (config, b) not in measured]
            if left and not self._is_pruned(config) and (gains[config] > least or config == best):
                open_cells[config] = left
        ranked = sorted(open_cells, key=lambda c: (c != running, -gains[c]))  # the best so far last: another may become it
        servers = [
            [Planned(config, batch, self.requests(batch)) for batch in open_cells[config]] for config in ranked[: self.together]
        ]
        if self.together == 1:
            return [[max(loads, key=lambda load: self._doubt(load.config, load.batch_size))] for loads in servers]
        return servers

    def _least_gain(self) -> float:
        """The more was spent, the more must be expected: a long search among near-equals finds none that is better."""
        return LEAST_GAIN * max(1.0, self._spent() / max(FREE_SERVERS, FREE_SHARE * (1 + len(self.candidates)))) ** 2

    def _spent(self) -> float:
        """What off and the loads of this run took, in servers that are measured at every batch size, as off was."""
        server = sum(load.cost_s for load in self.loads[: self._known] if load.config == self.off)
        return 1 + sum(load.cost_s for load in self.loads[self._known :]) / server

    def affords(self, servers: int) -> bool:
        """Whether so many more servers stay within `MOST_SHARE` of all."""
        return self._spent() + servers <= max(MOST_SERVERS, MOST_SHARE * (1 + len(self.candidates)))

    def _doubt(self, config: ServingConfig, batch: int) -> float:
        """How much of the score's uncertainty a batch size holds."""
        row = self.calibration.rows[config, batch]
        weight = sum(w.weights.get(batch, 0.0) for w in self.workloads)
        return weight * math.sqrt(max(self.calibration.covariance[row, row], 0.0))

    def _compare_with_incumbent(self, config: ServingConfig, batch: int) -> None:
        best = self.incumbent()
        if best == config or self._is_pruned(config):
            return
        gain = self.scores.expected_gain(best, MARGIN)[self.scores.configs.index(config)]
        if gain > LEAST_GAIN:
            return
        here = [(load, ttft) for load, (_, ttft) in zip(self.loads, self.ratios, strict=True) if load.batch_size == batch]
        for load, ttft in here:
            rivals = [found for found in here if (found[0].config, found[0].workload) == (best, load.workload)]
            # Prompts hardly depend on the drafter: where they took longer too, the machine was slower.
            if load.config == config and rivals and abs(math.log(ttft / rivals[-1][1])) <= ALIKE:
                reason = prune.loses_pairwise(load, rivals[-1][0], LOST)
                if reason:
                    self._prune([config], reason)
                    return

    def _load(self, config: ServingConfig, batch: int, requests: int) -> list[Observation]:
        found = self.measure(config, batch, "search", requests)
        loads = list(found.values()) if found else []
        self.loads += loads
        return loads

    def requests(self, batch: int, least: int = LEAST_REQUESTS) -> int:
        """Requests of a load: `least`, or as many as take, with off, `START_SHARE` of what the first server took to start."""
        first = self.loads[0]
        offs = [load for load in self.loads if (load.config, load.batch_size) == (self.off, batch)]
        request_s = offs[0].busy_s / len(offs[0].requests)
        cheap = int(START_SHARE * (first.cost_s - first.busy_s) / request_s)
        return max(requests_of(batch, least), min(cheap, MAX_REQUESTS))

    def _prune(self, configs: Sequence[ServingConfig], reason: str) -> None:
        for config in configs:
            entry = Pruned(config, reason)
            self.pruned.append(entry)
            self.on_prune(entry)

    def _is_pruned(self, config: ServingConfig) -> bool:
        return any(entry.config == config for entry in self.pruned)
