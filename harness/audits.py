"""What is looked at on the servers of the confirmation beside its loads. Each finding is on disk as soon as it is whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from backends.types import BackendError, ConfigError, Endpoint, ServingConfig
from harness import losslessness
from harness.answers import NoAnswer, Output, ask_all
from harness.lab import Lab
from harness.store import RunStore
from workloads.types import Request

REQUESTS = 16
"""Answers compared for each trace: few, since each costs as much as a measured request."""

AT_ONCE, CONTROL_AT_ONCE = 4, 1
"""Requests at a time on both sides of the comparison, and in the control: another batch shape."""

Answers = Mapping[int, Output]


class Kept:
    """A list of entries in the run directory, each found again by a key that is not shown."""

    def __init__(self, store: RunStore, name: str) -> None:
        self._store, self._name = store, f"{name}.json"
        path = store.directory / self._name
        self._entries: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def add(self, key: str, entry: dict[str, Any]) -> None:
        self._entries[key] = entry
        self._store.write_json(self._name, self._entries)

    def shown(self, keys: Sequence[str]) -> list[dict[str, Any]]:
        return [self._entries[key] for key in keys if key in self._entries]


class LosslessnessAudit:
    """Asks finalists and their off for the same answers and compares them. Texts stay in memory; only the comparison is kept."""

    def __init__(self, lab: Lab, store: RunStore, requests: Mapping[str, Sequence[Request]], seed: int) -> None:
        """`requests` by trace: those of the confirmation."""
        self._lab, self._seed = lab, seed
        self._requests = {name: few[:REQUESTS] for name, few in requests.items()}
        self._found = Kept(store, "losslessness")
        self._answers: dict[str, Mapping[str, Answers]] = {}  # trace and server -> kind of answers
        self._keys: list[str] = []

    def on(self, config: ServingConfig) -> None:
        """To be called while the server of `config` runs, before `off`. Several finalists may come before their off."""
        if config.backend == "simulated":  # it has no text to look at
            return
        for name in self._requests:
            key = key_of(name, config)
            if key not in self._keys:
                self._keys.append(key)
            if key not in self._found:
                self._guard(name, config, partial(self._ask, key, name, config))

    def off(self, config: ServingConfig) -> None:
        """Compare `config` with its off, whose server runs now."""
        for name in self._requests:
            key = key_of(name, config)
            if key not in self._found and key in self._answers:
                self._guard(name, config.off(), partial(self._compare, key, name, config))

    def result(self) -> list[dict[str, Any]]:
        """Entries of this run's configurations for `result.json`."""
        return self._found.shown(self._keys)

    def _compare(self, key: str, name: str, config: ServingConfig) -> None:
        off = key_of(name, config.off())
        if off not in self._answers:  # another finalist's comparison may have asked already
            self._ask(off, name, config.off())
        on_answers, off_answers = self._answers[key], self._answers[off]
        on_sampled, off_sampled = on_answers.get("sampled"), off_answers.get("sampled")
        entry = losslessness.entry(
            on_answers["greedy"],
            off_answers["greedy"],
            off_answers["control"],
            shapes=(AT_ONCE, CONTROL_AT_ONCE),
            sampled=(on_sampled, off_sampled) if on_sampled and off_sampled else None,
        )
        self._found.add(key, {"trace": name, "config": config.to_dict(), **entry})
        self._lab.progress.note(f"  losslessness: {entry['verdict'].replace('_', ' ')}: {entry['reason']}")

    def _ask(self, key: str, name: str, config: ServingConfig) -> None:
        look = partial(answers, requests=self._requests[name], seed=self._seed, control=config.variant == "off")
        self._answers[key] = self._lab.look(config, look)

    def _guard(self, name: str, config: ServingConfig, audit: Callable[[], None]) -> None:
        """An audit that cannot be done is a line for the reader and no reason to lose the run."""
        try:
            audit()
        except (NoAnswer, BackendError, ConfigError, ValueError) as problem:
            self._lab.progress.note(f"  losslessness of {config.label()} on {name} was not looked at: {problem}")


def answers(endpoint: Endpoint, requests: Sequence[Request], seed: int, *, control: bool) -> dict[str, Answers]:
    """What a server answers greedily and, where requests ask for it, sampled; of off also the control in another batch shape."""
    found: dict[str, Answers] = {"greedy": ask_all(endpoint, requests, at_once=AT_ONCE, gaps=control)}
    sampling = [request for request in requests if request.sampling.get("temperature") != 0]
    if sampling:
        found["sampled"] = ask_all(endpoint, sampling, at_once=AT_ONCE, seed=seed)
    if control:
        found["control"] = ask_all(endpoint, requests, at_once=CONTROL_AT_ONCE)
    return found


def key_of(trace: str, config: ServingConfig) -> str:
    return json.dumps([trace, config.to_dict()], sort_keys=True, default=str)
