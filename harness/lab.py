"""Where measuring happens: one server at a time, started when a configuration needs it and kept for every load it can serve."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import uvloop

from backends.endpoints import connect
from backends.process import Server, free_port
from backends.registry import ADAPTERS
from backends.types import BackendError, ConfigError, Endpoint, Launch, ServingConfig
from harness.answers import Output
from harness.environment import environment
from harness.fanout import more_processes
from harness.measure import measure, records_table
from harness.progress import RunProgress
from harness.replay import Replay, ReplayOptions, replay
from harness.settings import RunSettings
from harness.smoke import smoke_requests, smoke_test
from harness.store import RunStore, Trial, measurement_fields, model_identity, trial_key
from harness.types import Load, Measurement, Role
from harness.warmup import warm_up
from workloads.types import Request, Trace

ATTEMPTS = 2
"""A load whose measurement is not valid (the client sent late, a counter was reset) is sent once more, and said so."""


class Running(Protocol):
    """A server that can be measured: one of ours, or one that the user runs."""

    endpoint: Endpoint

    def alive(self) -> bool: ...

    def stop(self) -> None: ...


@dataclass(slots=True)
class Remote:
    """A server that the user runs: never started and never stopped here."""

    endpoint: Endpoint

    def alive(self) -> bool:
        return True  # a load on a dead server says so itself

    def stop(self) -> None:
        pass


class Lab:
    """Measures loads on configurations and records every trial. Nothing that the store already holds is measured again."""

    def __init__(
        self,
        settings: RunSettings,
        store: RunStore,
        traces: Mapping[str, Trace],
        progress: RunProgress,
        trials: list[Trial],
    ) -> None:
        """`trials` gains every trial of this run, measured now or before."""
        self.settings = settings
        self.store = store
        self.traces = traces
        self.progress = progress
        self.trials = trials
        self._requests = {name: trace.requests() for name, trace in traces.items()}
        self._smoke_requests = smoke_requests([r for requests in self._requests.values() for r in requests])
        self._smoke_outputs: dict[ServingConfig, Mapping[int, Output]] = {}
        self._server: Running | None = None
        self._serving: ServingConfig | None = None
        self._launch: Launch | None = None
        self._server_dir: Path | None = None
        self._broken: dict[str, BackendError] = {}
        self._gpus = len(environment()["gpu"])
        self._identity = model_identity(settings.model)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_server()

    def stop_server(self) -> None:
        if self._server:
            self._server.stop()
        self._server = self._serving = None

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
        key = self._key(config, load, indices, stage)
        trial = self.store.find(key)
        if trial is None:
            common = {"role": role, "config": config, "load": load, "key": key, "stage": stage, "requests": tuple(indices)}
            trial = self._run(common)
        else:
            trial = _alive(trial)
        if trial not in self.trials:
            self.trials.append(trial)
        return trial

    def endpoint(self, config: ServingConfig) -> Endpoint:
        """The running server of `config`, started if another or none runs: for looks that are no load.

        Raises:
            BackendError, ConfigError: it does not start.
        """
        return self._ensure_server(config, self.store.next_number()).endpoint

    def _run(self, common: dict[str, Any]) -> Trial:
        config, load = common["config"], common["load"]
        self.progress.begin(f"{config.label()}, {_load_label(load)}, {len(common['requests'])} requests")
        begun = time.monotonic()
        number = self.store.next_number()
        common = {"number": number, **common}
        try:
            server = self._ensure_server(config, number)
        except (BackendError, ConfigError) as error:  # ConfigError: the installed version of the engine lacks it
            trial = self._failed(common, str(error), begun)
        else:
            trial = self._measure(common, server, begun)
        self.progress.step(_summary(trial), time.monotonic() - begun)
        return trial

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
        """All that shapes every trial's numbers beside configuration, load and requests."""
        asked = self.settings
        return {
            "model": self._identity,
            "part": [asked.format, asked.window, asked.limit, asked.thin, asked.jitter_s, asked.time_unit, asked.prompts],
            "max_output_tokens": asked.max_output_tokens,
            "seed": asked.seed,
        }

    def _key(self, config: ServingConfig, load: Load, indices: Sequence[int], stage: str) -> str:
        conditions = {
            **self.conditions(),
            "stage": stage,
            "base_args": self.settings.base_args.get(config.backend, ()),
            "engine": self.settings.engines.get(config.backend),
        }
        return trial_key(config, load, self.traces[load.trace].sha256, indices, conditions)

    def _ensure_server(self, config: ServingConfig, number: int) -> Running:
        if self._server and self._serving == config and self._server.alive():
            return self._server
        self.stop_server()
        label = repr(config.to_dict())
        if label in self._broken:  # it failed to start for another load; starting it again would fail again
            raise self._broken[label]
        try:
            self._server = self._connect(config) if self.settings.endpoints else self._start(config, number)
            self._look(self._server, config)
        except BackendError as error:
            self.stop_server()
            self._broken[label] = error
            raise
        self._serving = config
        return self._server

    def _connect(self, config: ServingConfig) -> Remote:
        return Remote(connect(self.settings.endpoints[config.variant], api_key_env=self.settings.api_key_env))

    def _start(self, config: ServingConfig, number: int) -> Server:
        port = free_port()
        adapter = ADAPTERS[config.backend]
        command = self.settings.engines.get(config.backend, adapter.DEFAULT_COMMAND)
        self._server_dir = self.store.server_dir(number)
        self._launch = adapter.launch(
            config, port=port, command=command, base_args=self.settings.base_args.get(config.backend, ())
        )
        server = Server.start(self._launch, port=port, folder=self._server_dir, backend=config.backend)
        try:
            server.endpoint = adapter.read_back(server.endpoint, config, server.log())
        except BaseException:
            server.stop()
            raise
        return server

    def _look(self, server: Running, config: ServingConfig) -> None:
        """One look before any load; a simulated engine has no text to look at."""
        if config.backend == "simulated":
            return
        baseline = self._smoke_outputs.get(config.off())
        result = smoke_test(server.endpoint, config, self._smoke_requests, baseline=baseline)
        if result.failure:
            raise BackendError(result.failure, kind="unsupported")
        if config.variant == "off":
            self._smoke_outputs[config] = result.outputs
        server.endpoint = replace(server.endpoint, warnings=(*server.endpoint.warnings, *result.warnings))

    def _measure(self, common: dict[str, Any], server: Running, begun: float) -> Trial:
        load: Load = common["load"]
        requests = [self._requests[load.trace][i] for i in common["requests"]]
        options = ReplayOptions(max_output_tokens=self.settings.max_output_tokens, seed=self.settings.seed)
        endpoint = server.endpoint
        for attempt in range(ATTEMPTS):
            try:
                result = uvloop.run(_warm_replay(endpoint, requests, load, options))
            except BackendError as error:
                self.stop_server()
                return self._failed(common, str(error), begun)
            measurement = measure(result, load, slo=self.settings.slo, seed=self.settings.seed)
            if not server.alive():
                self.stop_server()
                return self._failed(common, "the engine died during the load; see server.log", begun)
            if measurement.invalid is None:
                break
            if attempt + 1 < ATTEMPTS:
                options = replace(options, processes=more_processes(load, result.client_busy, options.processes))
                self.progress.note(f"  measured again from {options.processes} client process(es): {measurement.invalid}")
        log = self._server_dir / "server.log" if self._server_dir else None
        if measurement.invalid or measurement.e2e_s is None:
            return self._failed(common, measurement.invalid or "no request completed", begun)
        trial = Trial(
            **common,
            state="COMPLETE",
            **_with_server_warnings(measurement, endpoint),
            engine=_engine(endpoint),
            cost=self._cost(begun),
        )
        launch = self._launch.to_dict() if self._launch else None
        table = records_table(result.records)
        return self.store.add(trial, launch=launch, server_log=log, records=table, counters=result.counters)

    def _failed(self, common: dict[str, Any], reason: str, begun: float) -> Trial:
        trial = Trial(**common, state="FAIL", reason=reason, cost=self._cost(begun))
        log = self._server_dir / "server.log" if self._server_dir else None
        return self.store.add(trial, launch=self._launch.to_dict() if self._launch else None, server_log=log)

    def _cost(self, begun: float) -> dict[str, float]:
        seconds = time.monotonic() - begun
        return {"seconds": seconds, "gpu_seconds": seconds * self._gpus}


def _alive(trial: Trial) -> Trial:
    """A trial that an earlier run pruned: whether this one prunes it will be seen."""
    return replace(trial, state="COMPLETE", reason=None) if trial.state == "PRUNED" else trial


async def _warm_replay(endpoint: Endpoint, requests: Sequence[Request], load: Load, options: ReplayOptions) -> Replay:
    warmed = await warm_up(endpoint, requests, load, options)
    result = await replay(endpoint, requests, load, options)
    return replace(result, warnings=(*warmed.warnings, *result.warnings))


def _with_server_warnings(measurement: Measurement, endpoint: Endpoint) -> dict[str, Any]:
    fields = measurement_fields(measurement)
    return {**fields, "warnings": (*endpoint.warnings, *measurement.warnings)}


def _engine(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "version": endpoint.version,
        "startup_s": endpoint.startup_s,
        "kv_cache_tokens": endpoint.kv_cache_tokens,
        "resolved": dict(endpoint.resolved),
    }


def _load_label(load: Load) -> str:
    if load.mode == "closed":
        return f"{load.concurrency} at a time"
    return "trace's own arrivals" if load.time_scale in (None, 1.0) else f"trace's arrivals, times x {load.time_scale:.3g}"


def _summary(trial: Trial) -> str:
    if trial.metrics is None or trial.speculation is None:
        return f"{trial.state}: {trial.reason}"
    e2e, tau = trial.metrics["e2e_s"]["p50"], trial.speculation["tau"]
    text = f"E2E p50 {e2e * 1e3:.0f} ms, {trial.metrics['output_tokens_per_s']:.1f} tokens/s"
    return text if tau is None else f"{text}, tau {tau:.2f}"
