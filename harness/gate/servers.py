"""The servers of both sides of a gate: started, kept, ended."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from backends.http_client import call
from backends.process import Server, free_port
from backends.registry import ADAPTERS
from backends.types import BackendError, Endpoint
from harness.environment import environment
from harness.gate.sides import Side, checkout, remove_checkout


class Servers:
    """Starts and ends the servers of both sides. `threads`: how many each may compute with, where not as many as it likes."""

    def __init__(self, folder: Path, *, both_at_once: bool, threads: int | None = None) -> None:
        self.folder = folder
        self.both_at_once = both_at_once
        self.threads = threads
        self.starts = 0
        self.starting_s = 0.0  # spent on starts so far
        self._running: dict[str, Server] = {}
        self._warm: set[str] = set()
        self._trees: dict[str, Path] = {}

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self.stop_all()
        for tree in self._trees.values():
            remove_checkout(tree)

    def stop_all(self) -> None:
        with contextlib.ExitStack() as stack:
            for server in self._running.values():
                stack.callback(server.stop)
            self._running, self._warm = {}, set()

    def endpoint(self, name: str, side: Side) -> Endpoint:
        """The running server of this side, started if there is none.

        Raises:
            BackendError: it does not start.
        """
        if side.url:
            return _named_endpoint(side)
        server = self._running.get(name)
        if server is None or not server.alive():
            if not self.both_at_once:
                self.stop_all()
            self._running.pop(name, None)
            self._warm.discard(name)
            self._running[name] = server = self._start(name, side)
        return server.endpoint

    def first_use(self, name: str) -> bool:
        """Whether this side's server has not been warmed up yet."""
        fresh = name not in self._warm
        self._warm.add(name)
        return fresh

    def pid(self, name: str) -> int:
        """Of this side's running server."""
        return self._running[name].pid

    def _start(self, name: str, side: Side) -> Server:
        assert side.config is not None
        self.starts += 1
        port, adapter = free_port(), ADAPTERS[side.backend]
        folder = self.folder / f"{self.starts:04d}-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        launch = adapter.launch(side.config, port=port, command=side.command, base_args=side.base_args)
        if side.revision:
            tree = self._trees.setdefault(side.revision, checkout(side.revision, self.folder))
            path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
            launch = replace(launch, env={**launch.env, "PYTHONPATH": path})
        if self.threads:
            launch = replace(launch, env={**launch.env, "OMP_NUM_THREADS": str(self.threads)})
        begun_s = time.monotonic()
        server = Server.start(launch, port=port, folder=folder, backend=side.backend)
        self.starting_s += time.monotonic() - begun_s
        try:
            server.endpoint = adapter.read_back(server.endpoint, side.config, server.log())
        except BaseException:
            server.stop()
            raise
        return server


def runs_both_at_once(baseline: Side, candidate: Side) -> bool:
    """Two servers are kept at once unless they would share a GPU's memory; servers that already run are never started."""
    started = [side for side in (baseline, candidate) if side.url is None]
    return len(started) < 2 or not environment()["gpu"]


def _named_endpoint(side: Side) -> Endpoint:
    """A server that already runs, with the name of the model it serves.

    Raises:
        BackendError: nothing answers there.
    """
    reply = call(f"{side.url}/v1/models")
    body = reply.json() if reply else None
    if not isinstance(body, dict) or not body.get("data"):
        raise BackendError(f"{side.url}/v1/models: no OpenAI-compatible server answers")
    return Endpoint(base_url=side.url or "", model=str(body["data"][0]["id"]), backend=side.backend)
