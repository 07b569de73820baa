"""Where engines run, one at a time: a server is started when a load needs it and kept for every load it can serve. A few small ones may
run side by side, to be measured in turn.

What goes in and comes out is plain data, so that a bench can live in another process or on another host (`harness.slots`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import psutil
import pyarrow as pa
import uvloop

from backends.endpoints import connect
from backends.process import LOG_NAME, Server, free_port
from backends.registry import ADAPTERS
from backends.types import BackendError, ConfigError, Endpoint, Launch, ServingConfig, SpecCounters
from harness.answers import NoAnswer, Output
from harness.fanout import more_processes
from harness.measure import measure, records_table
from harness.replay import Replay, ReplayOptions, replay
from harness.settings import RunSettings
from harness.smoke import smoke_test
from harness.store import measurement_fields
from harness.types import Load, Measurement
from harness.warmup import warm_up
from workloads.types import Request, WorkloadError

ROOM = 1.5
"""Free memory ÷ that of the largest server that runs, for each that is to run beside it."""
IDLE_CHECK_S, IDLE_SHARE = 1.0, 0.05  # of one core, that all waiting servers may use together
ATTEMPTS = 2
"""A load whose measurement is not valid (the client sent late, a counter was reset) is sent once more, and said so."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is the same for every load of a run."""

    settings: RunSettings
    smoke: tuple[Request, ...]  # what each server is asked before any load
    folder: Path  # servers write their logs and files below it
    gpus: int  # that a running engine keeps from others


@dataclass(frozen=True, slots=True)
class Order:
    """One load to be measured on one server."""

    key: str  # of the trial it will be
    config: ServingConfig
    load: Load
    requests: tuple[Request, ...]
    off_answers: Mapping[int, Output] | None = None  # of the smoke test of off, where it is known


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an order: a measurement, or the `reason` why there is none."""

    seconds: float
    gpu_seconds: float
    reason: str | None = None
    fields: Mapping[str, Any] | None = None  # of the trial: metrics, speculation, engine, warnings
    records: pa.Table | None = None
    counters: SpecCounters | None = None
    launch: Mapping[str, Any] | None = None
    server: str | None = None  # folder of the server that was asked
    server_log: str | None = None
    off_answers: Mapping[int, Output] | None = None  # if this was off
    notes: tuple[str, ...] = ()


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


@dataclass(slots=True)
class Serving:
    """A running server, and how it was started if it is ours."""

    server: Running
    launch: Launch | None = None
    folder: Path | None = None


class Bench:
    """The running servers, one as a rule, and the loads that are measured on them."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._settings = setup.settings
        self._running: dict[ServingConfig, Serving] = {}
        self._held: tuple[ServingConfig, ...] = ()  # may run side by side
        self._launch: Launch | None = None  # of the server that was used last, or failed to start
        self._folder: Path | None = None
        self._started_s = 0.0  # what starts took that no load has been charged for
        self._off_answers: dict[ServingConfig, Mapping[int, Output]] = {}
        self._broken: dict[str, BackendError] = {}

    def stop(self) -> None:
        """End the servers that run, if any."""
        for serving in self._running.values():
            serving.server.stop()
        self._running.clear()
        self._held = ()

    def hold(self, configs: Sequence[ServingConfig]) -> bool:
        """Start new servers of all `configs`, to run side by side until another one is needed. False where they do not fit: engines on a
        GPU take its memory, others need as much each as one that runs, and an idle one must be idle. At most one runs then."""
        if self._settings.endpoints or self._setup.gpus:
            return bool(self._settings.endpoints)
        begun = time.monotonic()
        try:
            if not self._running:
                self._ensure_server(configs[0])
            fit = self._leaves_room(len(configs) - 1)
            if fit:
                self.stop()
                self._held = tuple(configs)
                for config in configs:
                    self._ensure_server(config)
        except (BackendError, ConfigError, psutil.Error):  # what is wrong its next load says
            self.stop()
            fit = False
        self._started_s += time.monotonic() - begun
        return fit

    def _leaves_room(self, more: int) -> bool:
        """Whether so many more servers like those that run have memory, and all cores to themselves while these wait."""
        mine = [serving.server.pid for serving in self._running.values() if isinstance(serving.server, Server)]
        if psutil.virtual_memory().available < ROOM * more * max(_use(pid)[0] for pid in mine):
            return False
        used_s = -sum(_use(pid)[1] for pid in mine)
        time.sleep(IDLE_CHECK_S)
        used_s += sum(_use(pid)[1] for pid in mine)
        return used_s <= IDLE_SHARE * IDLE_CHECK_S

    def measure(self, order: Order) -> Outcome:
        """Measure one load. A server that does not start, or a measurement that is not valid, is an outcome with its cause."""
        begun, self._started_s = time.monotonic() - self._started_s, 0.0
        if order.off_answers is not None:
            self._off_answers.setdefault(order.config.off(), order.off_answers)
        try:
            server = self._ensure_server(order.config)
            outcome = self._measure(order, server)
        except (BackendError, ConfigError) as error:  # ConfigError: the installed version of the engine lacks it
            self.stop()
            outcome = Outcome(0.0, 0.0, str(error))
        seconds = time.monotonic() - begun
        return replace(
            outcome,
            seconds=seconds,
            gpu_seconds=seconds * self._setup.gpus,
            launch=self._launch.to_dict() if self._launch else None,
            server=self._folder.name if self._folder else None,
            server_log=self._log(),
            off_answers=self._off_answers.get(order.config),
        )

    def look(self, config: ServingConfig, function: Callable[[Endpoint], Any]) -> tuple[Any, Exception | None]:
        """What `function` finds on the server of `config`, started if need be, or the error that kept it from that."""
        try:
            return function(self._ensure_server(config).endpoint), None
        except (BackendError, ConfigError, NoAnswer, WorkloadError, ValueError) as error:
            return None, error

    def _ensure_server(self, config: ServingConfig) -> Running:
        known = self._running.get(config)
        if known and known.server.alive():
            self._launch, self._folder = known.launch, known.folder
            return known.server
        if config not in self._held:
            self.stop()
        elif known:
            known.server.stop()
        label = repr(config.to_dict())
        if label in self._broken:  # it failed to start for another load; starting it again would fail again
            raise self._broken[label]
        try:
            serving = self._connect(config) if self._settings.endpoints else self._start(config)
            self._running[config] = serving
            self._smoke(serving.server, config)
        except BackendError as error:
            self.stop()
            self._broken[label] = error
            raise
        return serving.server

    def _connect(self, config: ServingConfig) -> Serving:
        return Serving(Remote(connect(self._settings.endpoints[config.variant], api_key_env=self._settings.api_key_env)))

    def _start(self, config: ServingConfig) -> Serving:
        port = free_port()
        adapter = ADAPTERS[config.backend]
        self._folder = self._setup.folder / f"{config.variant}-k{config.k}-{time.time_ns()}"
        self._folder.mkdir(parents=True)
        self._launch = adapter.launch(
            config,
            port=port,
            command=self._settings.engines.get(config.backend, adapter.DEFAULT_COMMAND),
            base_args=self._settings.base_args.get(config.backend, ()),
        )
        server = Server.start(self._launch, port=port, folder=self._folder, backend=config.backend)
        try:
            server.endpoint = adapter.read_back(server.endpoint, config, server.log())
        except BaseException:
            server.stop()
            raise
        return Serving(server, self._launch, self._folder)

    def _smoke(self, server: Running, config: ServingConfig) -> None:
        """One look before any load; a simulated engine has no text to look at."""
        if config.backend == "simulated":
            return
        result = smoke_test(server.endpoint, config, self._setup.smoke, baseline=self._off_answers.get(config.off()))
        if result.failure:
            raise BackendError(result.failure, kind="unsupported")
        if config.variant == "off":
            self._off_answers[config] = result.outputs
        server.endpoint = replace(server.endpoint, warnings=(*server.endpoint.warnings, *result.warnings))

    def _measure(self, order: Order, server: Running) -> Outcome:
        options = ReplayOptions(max_output_tokens=self._settings.max_output_tokens, seed=self._settings.seed)
        notes = []
        for attempt in range(ATTEMPTS):
            result = uvloop.run(_warm_replay(server.endpoint, order.requests, order.load, options))
            measurement = measure(result, order.load, slo=self._settings.slo, seed=self._settings.seed)
            if not server.alive():
                raise BackendError("the engine died during the load; see server.log")
            if measurement.invalid is None:
                break
            if attempt + 1 < ATTEMPTS:
                options = replace(options, processes=more_processes(order.load, result.client_busy, options.processes))
                notes.append(f"measured again from {options.processes} client process(es): {measurement.invalid}")
        if measurement.invalid or measurement.e2e_s is None:
            return Outcome(0.0, 0.0, measurement.invalid or "no request completed", notes=tuple(notes))
        return Outcome(
            0.0,
            0.0,
            fields=_fields(measurement, server.endpoint),
            records=records_table(result.records),
            counters=result.counters,
            notes=tuple(notes),
        )

    def _log(self) -> str | None:
        path = self._folder / LOG_NAME if self._folder else None
        return path.read_text(errors="replace") if path and path.exists() else None


def _use(pid: int) -> tuple[int, float]:
    """Bytes of memory of a process and its children, and seconds of CPU that they have used."""
    root = psutil.Process(pid)
    found = [(p.memory_info().rss, sum(p.cpu_times()[:2])) for p in (root, *root.children(recursive=True))]
    return sum(rss for rss, _ in found), sum(cpu_s for _, cpu_s in found)


async def _warm_replay(endpoint: Endpoint, requests: Sequence[Request], load: Load, options: ReplayOptions) -> Replay:
    warmed = await warm_up(endpoint, requests, load, options)
    result = await replay(endpoint, requests, load, options)
    return replace(result, warnings=(*warmed.warnings, *result.warnings))


def _fields(measurement: Measurement, endpoint: Endpoint) -> dict[str, Any]:
    """Of the trial, what the measurement and the server say."""
    engine = {
        "version": endpoint.version,
        "startup_s": endpoint.startup_s,
        "kv_cache_tokens": endpoint.kv_cache_tokens,
        "resolved": dict(endpoint.resolved),
    }
    warnings = (*endpoint.warnings, *measurement.warnings)
    return {**measurement_fields(measurement), "engine": engine, "warnings": warnings}
