"""The main job: baseline, search, confirmation. Reads top to bottom as it runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from backends.findings import Finding
from backends.types import ServingConfig
from harness.audits import LosslessnessAudit
from harness.capacity import REPLAYS
from harness.capacity_replays import bracket_capacity
from harness.findings import Finalists, Findings, closed_load, open_load
from harness.funnel.search import MAX_FINALISTS
from harness.funnel.stage import FunnelStage
from harness.interference_probe import InterferenceProbe
from harness.lab import Lab, Wanted
from harness.plan import funnel_cells
from harness.probes import AcceptanceProbes
from harness.progress import RunProgress
from harness.quality import measure_quality, quality_key
from harness.result import build_result
from harness.result_schema import validate
from harness.search import Cell, CellStudy, cells_of, open_storage, open_study, search
from harness.selftest import keep, kept, timing
from harness.settings import RunSettings
from harness.site import Site
from harness.slots import Slot
from harness.space import Space
from harness.store import RunStore
from harness.types import Role
from workloads.select import hold_out, representative
from workloads.types import Trace

SEARCH_SHARE_OF_BUDGET = 0.6
"""Part of `--budget` after which no new cell is begun: the rest is for confirmation."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Which requests of a trace search trials send, and which confirmation sends."""

    search: tuple[int, ...]
    confirm: tuple[int, ...]


class Run:
    """One run of the main job over a resolved space. Everything measured is in the store before the next load starts."""

    def __init__(
        self,
        settings: RunSettings,
        space: Space,
        traces: Mapping[str, Trace],
        parts: Mapping[str, Parts],
        store: RunStore,
        progress: RunProgress,
        slots: Sequence[Slot],
        site: Site,
    ) -> None:
        self.settings = settings
        self.space = space
        self.traces = traces
        self.store = store
        self.progress = progress
        self.findings = Findings(settings, space, store.records)
        self.lab = Lab(settings, store, traces, progress, self.findings.trials, slots, site)
        self.parts = parts
        requests = {name: [trace.requests()[i] for i in parts[name].confirm] for name, trace in traces.items()}
        self.losslessness = LosslessnessAudit(self.lab, store, requests, settings.seed)
        self.probes = AcceptanceProbes(self.lab, store, requests, self.findings.trials)
        self.interference = InterferenceProbe(self.lab, store, requests, settings.seed)
        self.began = time.monotonic()
        self.storage = open_storage(settings.storage, store.directory)
        self.funnel = FunnelStage(
            settings=settings,
            space=space,
            findings=self.findings,
            lab=self.lab,
            parts=parts,
            store=store,
            progress=progress,
            study=self._study,
            traces=traces,
            stop=self._stop,
        )

    def execute(self, preflight: Sequence[Finding] = (), command: str = "") -> dict[str, Any]:
        """Run all stages, write `result.json` and return it. `preflight` and the `command` line are shown in it."""
        self.store.write_config(self.settings.to_dict())
        self.probes.preflight = preflight
        self.progress.expect(self._loads())
        selftest = self._selftest()
        with self.lab:
            self._refuse_infeasible()
            self._baseline()
            self._search()
            self._measure_quality()
            finalists = self._confirm()
        confirm_requests = sum(len(part.confirm) for part in self.parts.values())
        result = build_result(self.findings, finalists, self.traces, self.store, confirm_requests, self.lab.site.environment)
        result["predictions"] = self.funnel.predictions()
        result["funnel"] = self.funnel.result()
        result["losslessness"] = self.losslessness.result()
        result["diagnosis"] = self.probes.result()
        result["interference"] = self.interference.result()
        result["selftest"] = selftest
        result["preflight"] = [finding.to_dict() for finding in preflight]
        result["reproduce"] = {"command": command, "seed": self.settings.seed}
        validate(result)
        self.store.write_json("result.json", result)
        return result

    def _selftest(self) -> dict[str, Any] | None:
        """What the self-test found on this machine; run now, its timing part, where it never was. None where others measure."""
        if self.settings.executor == "ray":
            return None
        fingerprint = self.lab.site.environment["fingerprint"]
        if found := kept(fingerprint):
            return found
        self.progress.stage("self-test")
        self.progress.note("self-test of the measuring client on this machine, once: about 15 s")
        return keep(timing(), fingerprint)

    def _refuse_infeasible(self) -> None:
        for config, reason in self.space.infeasible:
            load = closed_load(next(iter(self.traces)), self.space.batch_sizes[0])
            self.lab.refuse(config, load, reason)

    def _baseline(self) -> None:
        """Off first: at every batch size, and at the trace's own load for the quantization the user runs."""
        self.progress.stage("baseline")
        for off in self.lab.ahead(([off] for off in self.space.offs), self._baseline_of):
            for wanted in self._baseline_of(off):
                self.lab.run(*wanted)

    def _baseline_of(self, off: ServingConfig) -> Iterator[Wanted]:
        for name, parts in self.parts.items():
            for batch in self.space.batch_sizes:
                yield Wanted(off, closed_load(name, batch), parts.search, "baseline", "baseline")
            if off in self.findings.primary_offs:
                yield from self._replays_of(off, name, "baseline")

    def _search(self) -> None:
        self.progress.stage("search")
        if not self.space.candidates or not any(trial.measured for trial in self.findings.trials):
            return  # without a baseline nothing can be compared
        left = self.space.candidates
        if self.settings.strategy == "funnel":
            left = tuple(self.funnel.search())
        if left:  # all of them for grid and random; for the funnel those whose engine does not say enough to predict anything
            strategy = "tpe" if self.settings.strategy == "funnel" else self.settings.strategy
            space = replace(self.space, candidates=left)
            study = self._study(cells_of(space))
            most, ahead = self.settings.max_trials, partial(self.lab.ahead, wanted_of=self._wanted_of)
            search(space, self._measure_cell, study, strategy=strategy, max_cells=most, stop=self._stop, ahead=ahead)

    def _stop(self) -> bool:
        """Whether the search has had its share of the budget."""
        budget_s = self.settings.budget_s
        if budget_s is not None and time.monotonic() > self.began + budget_s * SEARCH_SHARE_OF_BUDGET:
            return True
        searched = sum(trial.stage == "search" for trial in self.findings.trials)
        return self.settings.max_trials is not None and searched >= self.settings.max_trials * len(self.traces)

    def _out_of_budget(self) -> bool:
        return self.settings.budget_s is not None and time.monotonic() > self.began + self.settings.budget_s

    def _study(self, cells: Sequence[Cell]) -> CellStudy:
        return open_study(
            cells,
            self.storage,
            strategy=self.settings.strategy,
            seed=self.settings.seed,
            objectives=len(self.findings.objectives),
            conditions={**self.lab.conditions(), "traces": {name: trace.sha256 for name, trace in self.traces.items()}},
            identity=self.lab.identity,
        )

    def _measure_cell(self, cell: Cell) -> tuple[float, ...] | None:
        """Mean over the traces of each objective's log ratio to the baseline; None if any trace could not be measured."""
        rows = []
        for wanted in self._wanted_of(cell):
            values = self.findings.cell_values(self.lab.run(*wanted))
            if values is None:
                return None
            rows.append(values)
        self.progress.best(", ".join(c.label() for c in self.findings.finalists(list(self.traces)).values()))
        return tuple(sum(column) / len(column) for column in zip(*rows, strict=True))

    def _wanted_of(self, cell: Cell) -> Iterator[Wanted]:
        for name, parts in self.parts.items():
            yield Wanted(cell.config, closed_load(name, cell.batch_size), parts.search, "search", "search")

    def _measure_quality(self) -> None:
        """What each other quantization, of weights or KV cache, costs against the one the user runs; kept, since it depends on the
        model alone."""
        offs = [off for off in self.space.offs if off.backend == "reference"]
        if len(offs) < 2:
            return
        path = self.store.directory / "quality.json"
        if path.exists():
            self.findings.quality.update(json.loads(path.read_text()))
        if {quality_key(off) for off in offs[1:]} <= self.findings.quality.keys():
            return
        self.lab.stop_server()
        self.progress.stage("quality of the quantizations")
        requests = [request for trace in self.traces.values() for request in trace.requests()]
        found = measure_quality(requests, baseline=offs[0], others=offs[1:])
        self.findings.quality.update(found)
        self.store.write_json("quality.json", self.findings.quality)

    def _confirm(self) -> Finalists:
        """The finalists of each group that may win and their off again, on more requests. Returns the finalist of each group."""
        self.progress.stage("confirm")
        for key, config in self.findings.finalists(list(self.traces)).items():
            if key not in self.funnel.funnels and self.findings.may_win(config):
                for server in (config, config.off()):
                    for name, parts in self.parts.items():
                        for batch in self.space.batch_sizes:
                            self.lab.run(server, closed_load(name, batch), parts.confirm, "confirm", "confirm")
                    self._after_confirmation([config], server)
                self._finish_group(config)
        for key, funnel in self.funnel.funnels.items():
            if self.findings.may_win(funnel.candidates[0]):
                finalists = self.funnel.ranked(key)
                self.funnel.confirm(key, partial(self._after_confirmation, finalists))
                if finalists:
                    self._finish_group(self.funnel.finalists()[key])
        return {**self.findings.finalists(list(self.traces)), **self.funnel.finalists()}

    def _replays_of(self, server: ServingConfig, name: str, role: Role) -> Iterator[Wanted]:
        """A trace's own load on a server, as often as was asked, where the trace has arrival times."""
        if self._has_arrivals(name):
            for number in range(self.settings.replays):
                stage = f"{role}{number + 1}" if number else role
                yield Wanted(server, open_load(name, self.settings), self.parts[name].confirm, role, stage)

    def _after_confirmation(self, finalists: Sequence[ServingConfig], server: ServingConfig) -> None:
        """What else is measured while a confirmed server runs: the trace's own load, and the audit's answers."""
        if server != server.off():
            for name in self.parts:
                for replay in self._replays_of(server, name, "confirm"):
                    self.lab.run(*replay)
            self.probes.on(server)
            self.losslessness.on(server)
        else:
            for config in finalists:
                self.losslessness.off(config)

    def _finish_group(self, config: ServingConfig) -> None:
        """Off last, on the very requests it was first measured on: the drift. Then what else was asked for."""
        for name, parts in self.parts.items():
            load = closed_load(name, self.space.batch_sizes[-1])
            self.lab.run(config.off(), load, parts.search, "baseline", "baseline_last")
        self.losslessness.off(config)  # if its last round ended without off
        if self.settings.slo:
            self.progress.stage("capacity")
            requests = {name: part.confirm for name, part in self.parts.items() if self._has_arrivals(name)}
            arriving = {name: self.traces[name] for name in requests}
            bracket_capacity(self.lab, self.findings, config, arriving, requests, self._out_of_budget)
        if "interference" in self.settings.probes:
            self.progress.stage("interference")
            self.interference.run(config)

    def _loads(self) -> int:
        """Loads of the whole run: of the funnel an estimate, else of a search that visits every cell."""
        space, n = self.space, len(self.traces)
        groups = len(self.findings.primary_offs) if space.candidates else 0
        arrivals = self.settings.replays * sum(map(self._has_arrivals, self.traces))
        batches = len(space.batch_sizes)
        baseline = len(space.offs) * batches * n + groups * arrivals
        servers = 2  # the finalist and off; of the funnel two finalists
        cells = len(space.candidates) * batches
        if self.settings.strategy == "funnel":
            servers, cells = 1 + MAX_FINALISTS, funnel_cells(space, self.settings.max_trials)
        replays = (servers - 1) + (2 * REPLAYS if self.settings.slo else 0)
        return baseline + cells * n + groups * (n * (servers * batches + 1) + replays * arrivals)

    def _has_arrivals(self, name: str) -> bool:
        return all(request.arrival_s is not None for request in self.traces[name].requests())


def split(trace: Trace, settings: RunSettings) -> Parts:
    """A representative part for cheap trials and a larger one for confirmation, disjoint where the trace is long enough."""
    search = representative(trace, settings.search_requests, seed=settings.seed)
    rest = hold_out(trace, search, settings.confirm_requests, seed=settings.seed)
    return Parts(tuple(search), tuple(rest))
