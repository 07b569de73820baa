"""What a run measures: each trial once, on whichever slot is free, and on disk before the next load starts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from backends.types import BackendError, Endpoint, ServingConfig
from harness.answers import Output
from harness.bench import Order, Outcome
from harness.progress import RunProgress
from harness.settings import RunSettings
from harness.site import Site
from harness.slots import Slot, measure_all
from harness.store import RunStore, Trial, trial_key
from harness.types import Load, Role
from workloads.types import Request, Trace

Item = TypeVar("Item")


class Wanted(NamedTuple):
    """A load and what it is for."""

    config: ServingConfig
    load: Load
    requests: Sequence[int]  # positions in the load's trace
    role: Role
    stage: str


class Lab:
    """Measures loads on configurations and records every trial. Nothing that the store already holds is measured again."""

    def __init__(
        self,
        settings: RunSettings,
        store: RunStore,
        traces: Mapping[str, Trace],
        progress: RunProgress,
        trials: list[Trial],
        slots: Sequence[Slot],
        site: Site,
    ) -> None:
        """`trials` gains every trial of this run, measured now or before. `site` is what all slots' hosts are."""
        self.settings = settings
        self.store = store
        self.traces = traces
        self.progress = progress
        self.trials = trials
        self.slots = list(slots)
        self._requests: dict[str, Sequence[Request]] = {name: trace.requests() for name, trace in traces.items()}
        self._off_answers: dict[ServingConfig, Mapping[int, Output]] = {}
        self._failed_ahead: dict[str, Trial] = {}
        self.site = site

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for slot in self.slots:
            if kind is None:
                _stop(slot)
            slot.close()

    def stop_server(self) -> None:
        """End what runs on the slot where single loads are measured."""
        _stop(self.slots[0])

    def side_by_side(self, wanted: Sequence[Wanted]) -> bool:
        """Start the servers that `wanted` still needs measured, so that its loads can take turns; False where they do not fit, or nothing
        is left to measure."""
        left = [one for one in wanted if self.store.find(self._key_of(one)) is None]
        slot = self.slots[0]
        try:
            return bool(left) and bool(slot.call("hold", tuple(dict.fromkeys(one.config for one in left))).result())
        except slot.lost:
            slot.renew()
            return False

    def refuse(self, config: ServingConfig, load: Load, reason: str) -> None:
        """Record a configuration that is refused before any start."""
        key = self._key(config, load, (), "refused")
        known = next((t for t in self.store.trials if t.key == key), None)
        if known is None:
            number = self.store.next_number()
            known = self.store.add(Trial(number, "INFEASIBLE", "search", config, load, key, "refused", (), reason=reason))
        self.trials.append(known)
        self.progress.note(f"not run: {config.label()}: {reason}")

    def run(self, config: ServingConfig, load: Load, indices: Sequence[int], role: Role, stage: str) -> Trial:
        """Measure the requests `indices` of the load's trace on `config`, or return what was measured before.

        A server that does not start or a measurement that is not valid gives a FAIL trial with its cause and no numbers.
        """
        wanted = Wanted(config, load, indices, role, stage)
        key = self._key_of(wanted)
        trial = self.store.find(key) or self._failed_ahead.pop(key, None)
        if trial is None:
            self.progress.begin(_what(wanted))
            ((_, outcome, slot),) = measure_all(self.slots, [iter([self._order(key, wanted)])])
            return self._record(key, wanted, outcome, slot)
        return self._note(_alive(trial))

    def ahead(self, servers: Iterable[Iterable[Item]], wanted_of: Callable[[Item], Iterable[Wanted]]) -> Iterator[Item]:
        """Measure what each item wants, on all slots at once, so that `run` will find it. Items come back as they are done.

        The items of one server go to one slot, one after the other, and are asked for when it is free. With a single slot nothing is
        measured here: `run` does it.
        """
        if len(self.slots) == 1:
            for items in servers:
                yield from items
            return
        wanted: dict[str, Wanted] = {}
        waiting: dict[str, Item] = {}
        left: dict[Item, int] = {}
        done: list[Item] = []

        def orders(items: Iterable[Item]) -> Iterator[Order]:
            for item in items:
                new = {self._key_of(one): one for one in wanted_of(item)}
                new = {key: one for key, one in new.items() if self.store.find(key) is None and key not in waiting}
                if not new:
                    done.append(item)
                left[item] = len(new)
                for key, one in new.items():
                    wanted[key], waiting[key] = one, item
                    self.progress.begin(_what(one))
                    yield self._order(key, one)

        for order, outcome, slot in measure_all(self.slots, map(orders, servers)):
            trial = self._record(order.key, wanted[order.key], outcome, slot)
            if not trial.measured:
                self._failed_ahead[order.key] = trial
            item = waiting.pop(order.key)
            left[item] -= 1
            if not left[item]:
                yield item
            yield from done
            done.clear()
        yield from done
        for slot in self.slots[1:]:  # idle from here on, and not to be heard by what is measured alone
            _stop(slot)

    def look(self, config: ServingConfig, function: Callable[[Endpoint], Any]) -> Any:
        """What `function` finds on the server of `config`, which is started if another or none runs: for looks that are no load.

        Raises:
            BackendError, ConfigError: it does not start. And whatever `function` raises.
        """
        slot = self.slots[0]
        try:
            found, error = slot.call("look", config, function).result()
        except slot.lost as lost:
            slot.renew()
            raise BackendError(f"the worker on {slot.name} was lost: {lost}") from None
        if error is not None:
            raise error
        return found

    def recall(self, stage: str) -> list[Trial]:
        """Measured trials of an earlier run that this one would measure again: same server, load, requests and conditions."""
        found = []
        for trial in self.store.trials:
            known = trial.measured and trial.stage == stage and trial.load.trace in self.traces
            if known and trial.key == self._key(trial.config, trial.load, trial.requests, stage):
                found.append(_alive(trial))
        self.trials.extend(trial for trial in found if trial not in self.trials)
        return found

    def conditions(self) -> dict[str, Any]:
        """All that shapes every trial's numbers beside server, load and requests."""
        asked = self.settings
        return {
            "hardware": self.site.hardware,
            "part": [asked.format, asked.window, asked.limit, asked.thin, asked.jitter_s, asked.time_unit, asked.prompts],
            "max_output_tokens": asked.max_output_tokens,
            "seed": asked.seed,
        }

    def _key_of(self, wanted: Wanted) -> str:
        return self._key(wanted.config, wanted.load, wanted.requests, wanted.stage)

    def identity(self, config: ServingConfig) -> dict[str, Any]:
        """All that shapes what its servers are and that is not in the configuration: checkpoints, engine, production flags."""
        asked = self.settings
        command = {"base_args": asked.base_args.get(config.backend, ()), "command": asked.engines.get(config.backend)}
        return {**self.site.identity(config), **command}

    def _key(self, config: ServingConfig, load: Load, indices: Sequence[int], stage: str) -> str:
        conditions = {**self.conditions(), **self.identity(config), "stage": stage}
        return trial_key(config, load, self.traces[load.trace].sha256, indices, conditions)

    def _order(self, key: str, wanted: Wanted) -> Order:
        requests = self._requests[wanted.load.trace]
        return Order(
            key,
            wanted.config,
            wanted.load,
            tuple(requests[i] for i in wanted.requests),
            self._off_answers.get(wanted.config.off()),
        )

    def _record(self, key: str, wanted: Wanted, outcome: Outcome, slot: Slot) -> Trial:
        for note in outcome.notes:
            self.progress.note(f"  {note}")
        if outcome.off_answers is not None:
            self._off_answers[wanted.config] = outcome.off_answers
        if outcome.server is not None:
            self.store.note_server(outcome.server)
        trial = Trial(
            number=self.store.next_number(),
            state="FAIL" if outcome.fields is None else "COMPLETE",
            role=wanted.role,
            config=wanted.config,
            load=wanted.load,
            key=key,
            stage=wanted.stage,
            requests=tuple(wanted.requests),
            reason=outcome.reason,
            cost={"seconds": outcome.seconds, "gpu_seconds": outcome.gpu_seconds},
            worker=slot.name,
            **(outcome.fields or {}),
        )
        self.store.add(
            trial, launch=outcome.launch, server_log=outcome.server_log, records=outcome.records, counters=outcome.counters
        )
        self.progress.step(_summary(trial), outcome.seconds)
        return self._note(trial)

    def _note(self, trial: Trial) -> Trial:
        if trial not in self.trials:
            self.trials.append(trial)
        return trial


def _stop(slot: Slot) -> None:
    with contextlib.suppress(*slot.lost):  # with its worker its engine is gone, too
        slot.call("stop").result()


def _alive(trial: Trial) -> Trial:
    """A trial that an earlier run pruned: whether this one prunes it will be seen."""
    return replace(trial, state="COMPLETE", reason=None) if trial.state == "PRUNED" else trial


def _what(wanted: Wanted) -> str:
    load = wanted.load
    if load.mode == "closed":
        how = f"{load.concurrency} at a time"
    else:
        how = "trace's own arrivals" if load.time_scale in (None, 1.0) else f"trace's arrivals, times x {load.time_scale:.3g}"
    return f"{wanted.config.label()}, {how}, {len(wanted.requests)} requests"


def _summary(trial: Trial) -> str:
    if trial.metrics is None or trial.speculation is None:
        return f"{trial.state}: {trial.reason}"
    e2e, tau = trial.metrics["e2e_s"]["p50"], trial.speculation["tau"]
    text = f"E2E p50 {e2e * 1e3:.0f} ms, {trial.metrics['output_tokens_per_s']:.1f} tokens/s"
    return text if tau is None else f"{text}, tau {tau:.2f}"
