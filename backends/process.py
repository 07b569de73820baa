"""One engine process: started from a `Launch`, ready when it has emitted a token, ended with everything it started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from backends import gpu_memory
from backends.failures import classify
from backends.http_client import call
from backends.types import BackendError, Endpoint, Launch

Progress = Callable[[float, str], None]
"""Called about once a second during a start with the seconds since it began and the log's last line."""

SUPERVISOR = Path(__file__).with_name("supervisor.py")
FOLDER = "{folder}"  # stands for the trial's folder in the arguments and environment of a `Launch`
LOG_NAME = "server.log"
LOG_HEAD_BYTES = LOG_TAIL_BYTES = 1 << 20
SHOWN_TAIL_BYTES = 4096  # of the log, in an error
STOP_GRACE_S = 20.0  # between SIGTERM and SIGKILL: engines finish their requests and free GPU memory
KILL_MARGIN_S = 15.0  # how long the supervisor may need after that
POLL_S = 0.1


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A running engine. Use it as a context manager, or call `stop`: the engine ends with the harness in any case."""

    def __init__(self, launch: Launch, *, port: int, folder: Path, backend: str, api_key_env: str | None = None) -> None:
        """Start the process and return at once; `start` is what callers want.

        Raises:
            BackendError: the port is taken, or the command does not exist.
        """
        _require_free(port)
        folder = folder.absolute()
        write_files(launch, folder)
        self._log_path = folder / LOG_NAME
        self._log_path.unlink(missing_ok=True)
        self._gpu_level = gpu_memory.used_bytes()
        self._started = time.monotonic()
        self._command = launch.argv[0]
        self._engine_pid: int | None = None
        self._exit_code: int | None = None
        self._survivors: list[int] = []
        self._pending = b""
        self._supervisor = _spawn(launch, folder)
        self.endpoint = Endpoint(
            base_url=f"http://127.0.0.1:{port}", model=launch.served_model, backend=backend, api_key_env=api_key_env
        )
        self._read_status(timeout_s=10.0)

    @classmethod
    def start(
        cls,
        launch: Launch,
        *,
        port: int,
        folder: Path,
        backend: str,
        on_progress: Progress | None = None,
        api_key_env: str | None = None,
    ) -> Server:
        """Start the engine and wait until /health is 200 and one token has come back.

        The engine's output goes to ``folder/server.log``. `launch.files` are written into `folder`, and ``{folder}`` in the
        launch's arguments and environment stands for its absolute path.

        Raises:
            BackendError: the engine did not get ready; `kind` says why, `log_tail` holds the end of its log. Nothing runs then.
        """
        server = cls(launch, port=port, folder=folder, backend=backend, api_key_env=api_key_env)
        try:
            server._wait_ready(launch.ready_timeout_s, on_progress)
        except BaseException:
            server._end(grace_s=2.0)
            raise
        return server

    @property
    def pid(self) -> int:
        """Of the engine's main process."""
        assert self._engine_pid is not None  # known once `start` has returned
        return self._engine_pid

    def alive(self) -> bool:
        """Whether the engine's main process runs."""
        self._read_status()
        return self._exit_code is None and self._supervisor.poll() is None

    def log(self) -> str:
        """The engine's output so far; the middle is missing where it was long."""
        return self._log_path.read_text(errors="replace") if self._log_path.exists() else ""

    def failure(self) -> BackendError:
        """Why the engine, which no longer runs, ended."""
        log = self.log()
        kind, line = classify(self._exit_code, log)
        return BackendError(f"{self.endpoint.backend} ended: {line}", kind=kind, log_tail=log[-SHOWN_TAIL_BYTES:])

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End the engine and all its descendants: SIGTERM, up to `grace_s` seconds, SIGKILL. May be called twice.

        Raises:
            BackendError: a process survived SIGKILL, or GPU memory did not come back: the next start would be disturbed.
        """
        self._end(grace_s)
        if self._survivors:
            raise BackendError(
                f"process {self._survivors[0]} of {self.endpoint.backend} does not die of SIGKILL (stuck in a driver call?): "
                "restart the machine or its driver before going on",
                kind="hang",
            )
        held = gpu_memory.wait_released(self._gpu_level)
        if held:
            raise BackendError(f"{held}: end the process that holds it before going on", kind="out_of_memory")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.stop()
        else:
            self._end(STOP_GRACE_S)

    def wait_healthy(self, timeout_s: float, on_progress: Progress | None = None) -> None:
        """Wait until /health is 200, up to `timeout_s` seconds since the process began. No request is sent.

        Raises:
            BackendError: as `start`.
        """
        deadline = self._started + timeout_s
        shown_s = 0.0
        while not self._healthy():
            if not self.alive():
                raise self._start_failure()
            elapsed_s = time.monotonic() - self._started
            if time.monotonic() >= deadline:
                raise self._hang(f"/health did not answer 200 within {timeout_s:.0f} s")
            if on_progress and elapsed_s >= shown_s + 1.0:
                shown_s = elapsed_s
                on_progress(elapsed_s, _last_line(self.log()))
            time.sleep(POLL_S)

    def _wait_ready(self, timeout_s: float, on_progress: Progress | None) -> None:
        self.wait_healthy(timeout_s, on_progress)
        self._require_token(self._started + timeout_s, timeout_s)
        ready_s = time.monotonic() - self._started
        self.endpoint = replace(self.endpoint, startup_s=ready_s)

    def _healthy(self) -> bool:
        reply = call(f"{self.endpoint.base_url}/health")
        return reply is not None and reply.status == 200

    def _require_token(self, deadline: float, timeout_s: float) -> None:
        """A server that answers /health may still die of its first request (vLLM does where a sampler is missing)."""
        reply = call(
            f"{self.endpoint.base_url}/v1/completions",
            {"model": self.endpoint.model, "prompt": "Hello", "max_tokens": 1, "temperature": 0},
            timeout_s=max(1.0, deadline - time.monotonic()),
            api_key_env=self.endpoint.api_key_env,
        )
        if reply is None or reply.status >= 500:
            self._read_status(timeout_s=2.0)  # an engine that dies of a request needs a moment to do so
        if not self.alive():
            raise self._start_failure()
        if reply is None:
            raise self._hang(f"no token came back within {timeout_s:.0f} s")
        body = reply.json()
        if reply.status == 200 and isinstance(body, dict) and body.get("choices"):
            return
        log = self.log()
        kind, line = classify(None, log)
        detail = f"HTTP {reply.status} {reply.body[:200].strip()}" if reply.status < 500 or kind == "crash" else line
        raise self._error(f"refused its first request: {detail}", kind, log)

    def _start_failure(self) -> BackendError:
        log = self.log()
        kind, line = classify(self._exit_code, log)
        return self._error(f"did not start: {line}", kind, log)

    def _hang(self, what: str) -> BackendError:
        return self._error(
            f"did not start: {what}; last line of its log: {_last_line(self.log()) or '(none)'}", "hang", self.log()
        )

    def _error(self, what: str, kind: str, log: str) -> BackendError:
        message = f"{self.endpoint.backend} {what} [{kind}; see {self._log_path}]"
        return BackendError(message, kind=kind, log_tail=log[-SHOWN_TAIL_BYTES:])

    def _end(self, grace_s: float) -> None:
        supervisor = self._supervisor
        if supervisor.stdin is None or supervisor.stdin.closed:
            return
        try:
            supervisor.stdin.write(b"stop %.1f\n" % grace_s)
            supervisor.stdin.flush()
            supervisor.wait(grace_s + KILL_MARGIN_S)
        except BrokenPipeError:  # the engine, and with it the supervisor, had ended before
            supervisor.wait(KILL_MARGIN_S)
        except subprocess.TimeoutExpired:
            supervisor.kill()
        self._read_status()
        if self._exit_code is None and self._engine_pid:  # somebody killed the supervisor
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._engine_pid, signal.SIGKILL)
        supervisor.stdin.close()
        if supervisor.stdout:
            supervisor.stdout.close()

    def _read_status(self, timeout_s: float = 0.0) -> None:
        """Take in what the supervisor reported; with `timeout_s`, wait for a line or its end that long."""
        out = self._supervisor.stdout
        deadline = time.monotonic() + timeout_s
        while out is not None and not out.closed:
            data = out.read()  # None: nothing yet; empty: the supervisor ended
            self._pending += data or b""
            *lines, self._pending = self._pending.split(b"\n")
            for line in lines:
                self._note(json.loads(line))
            if lines or data == b"" or time.monotonic() >= deadline:
                return
            time.sleep(0.01)

    def _note(self, message: dict[str, Any]) -> None:
        if "error" in message:
            self._end(0.0)
            raise BackendError(
                f"cannot start {self.endpoint.backend}: {self._command}: {message['error']}: "
                f"say where it is installed with --engine {self.endpoint.backend}=...",
                kind="missing_command",
            )
        self._engine_pid = message.get("pid", self._engine_pid)
        self._exit_code = message.get("exit", self._exit_code)
        self._survivors = message.get("survivors", self._survivors)


def write_files(launch: Launch, folder: Path) -> None:
    """Write `launch.files` below `folder`, which is made.

    Raises:
        BackendError: a path leaves the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in launch.files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise BackendError(f"file '{name}' of the launch lies outside the trial's folder", kind="bad_flag")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def _spawn(launch: Launch, folder: Path) -> subprocess.Popen[bytes]:
    argv = [part.replace(FOLDER, str(folder)) for part in launch.argv]
    env = {name: value.replace(FOLDER, str(folder)) for name, value in launch.env.items()}
    options = [str(os.getpid()), str(folder / LOG_NAME), str(LOG_HEAD_BYTES), str(LOG_TAIL_BYTES)]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(SUPERVISOR), *options, *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
        bufsize=0,
        start_new_session=True,  # a Ctrl-C in the terminal reaches the harness alone, which then stops the engine in order
    )
    if process.stdout:
        os.set_blocking(process.stdout.fileno(), False)
    return process


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            message = f"port {port} of 127.0.0.1 is in use ({error.strerror}): choose another or end what listens there"
            raise BackendError(message, kind="port_in_use") from None


def _last_line(log: str) -> str:
    lines = [line.strip() for line in log[-SHOWN_TAIL_BYTES:].splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
