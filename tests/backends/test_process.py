"""Supervision, with real processes: what starts, why it did not, and that nothing outlives the harness."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from backends.process import LOG_HEAD_BYTES, LOG_TAIL_BYTES, Server, free_port
from backends.types import BackendError, Launch

FAKE = Path(__file__).with_name("fake_engine.py")
ROOT = Path(__file__).parents[2]


def launch(port: int, behaviour: str, *extra: str, timeout_s: float = 30.0, env: dict[str, str] | None = None) -> Launch:
    argv = (sys.executable, "-S", str(FAKE), str(port), behaviour, *extra)
    return Launch(argv=argv, env=env or {}, ready_timeout_s=timeout_s)


def start(folder: Path, behaviour: str, *extra: str, timeout_s: float = 30.0) -> Server:
    port = free_port()
    return Server.start(launch(port, behaviour, *extra, timeout_s=timeout_s), port=port, folder=folder, backend="fake")


def pids(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_server_is_ready_after_a_token_and_gone_after_stop(tmp_path: Path) -> None:
    with start(tmp_path, "serve", str(tmp_path / "pids")) as server:
        assert server.alive()
        assert server.endpoint.startup_s is not None
        assert server.endpoint.startup_s > 0
        (pid,) = pids(tmp_path / "pids")
        assert running(pid)
    assert not running(pid)
    assert not server.alive()
    server.stop()  # a second time does no harm


def test_grandchildren_in_sessions_of_their_own_end_with_the_engine(tmp_path: Path) -> None:
    server = start(tmp_path, "family", str(tmp_path / "pids"))
    assert wait_until(lambda: len(pids(tmp_path / "pids")) == 3, 5)
    family = pids(tmp_path / "pids")
    assert len({os.getsid(pid) for pid in family}) == 3
    server.stop(grace_s=0.5)
    assert [pid for pid in family if running(pid)] == []


def test_grandchildren_end_when_the_engine_is_killed_by_somebody_else(tmp_path: Path) -> None:
    server = start(tmp_path, "family", str(tmp_path / "pids"))
    assert wait_until(lambda: len(pids(tmp_path / "pids")) == 3, 5)
    family = pids(tmp_path / "pids")
    os.kill(family[0], signal.SIGKILL)
    assert wait_until(lambda: not any(running(pid) for pid in family), 5)
    assert not server.alive()
    assert server.failure().kind == "out_of_memory"  # SIGKILL that we did not send
    server.stop()


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    server = start(tmp_path, "stubborn", str(tmp_path / "pids"))
    (pid,) = pids(tmp_path / "pids")
    server.stop(grace_s=0.5)
    assert not running(pid)


def test_the_engine_ends_although_its_supervisor_was_killed(tmp_path: Path) -> None:
    server = start(tmp_path, "stubborn", str(tmp_path / "pids"))
    (pid,) = pids(tmp_path / "pids")
    os.kill(parent_of(pid), signal.SIGKILL)
    assert wait_until(lambda: not server.alive(), 5)
    server.stop()
    assert wait_until(lambda: not running(pid), 5)


HARNESS = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from backends.process import Server
from backends.types import Launch
launch = Launch(argv=(sys.executable, "-S", {fake!r}, {port!r}, {behaviour!r}, {pids!r}))
server = Server.start(launch, port=int({port!r}), folder=Path({folder!r}), backend="fake")
print("ready", flush=True)
sys.stdin.read()
"""


def run_harness(folder: Path, behaviour: str) -> subprocess.Popen[str]:
    values = {"root": str(ROOT), "fake": str(FAKE), "port": str(free_port()), "behaviour": behaviour}
    code = HARNESS.format(**values, pids=str(folder / "pids"), folder=str(folder))
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_the_engine_ends_although_the_harness_was_killed_with_its_children(tmp_path: Path) -> None:
    """As Ray does it to a worker that ends."""
    with run_harness(tmp_path, "family") as harness:
        assert harness.stdout
        assert harness.stdout.readline() == "ready\n"
        family = pids(tmp_path / "pids")
        for child in psutil.Process(harness.pid).children():
            child.kill()
        harness.kill()
    assert len(family) > 1
    assert wait_until(lambda: not any(running(pid) for pid in family), 5)


@pytest.mark.parametrize("behaviour", ["family", "family_hang"], ids=["while it serves", "while it starts"])
def test_nothing_is_left_5_s_after_the_harness_is_killed(tmp_path: Path, behaviour: str) -> None:
    with run_harness(tmp_path, behaviour) as harness:
        assert harness.stdout
        if behaviour == "family":
            assert harness.stdout.readline() == "ready\n"
        assert wait_until(lambda: len(pids(tmp_path / "pids")) == 3, 20)
        family = pids(tmp_path / "pids")
        supervisor = parent_of(family[0])
        harness.send_signal(signal.SIGKILL)
        assert wait_until(lambda: not any(running(pid) for pid in [supervisor, *family]), 5)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(BackendError, match=f"port {port} of 127.0.0.1 is in use") as error:
            Server.start(launch(port, "serve"), port=port, folder=tmp_path, backend="fake")
    assert error.value.kind == "port_in_use"
    assert not (tmp_path / "server.log").exists()


def test_a_port_can_be_used_again_at_once(tmp_path: Path) -> None:
    port = free_port()
    for _ in range(2):
        Server.start(launch(port, "serve"), port=port, folder=tmp_path, backend="fake").stop()


@pytest.mark.parametrize(
    ("behaviour", "kind", "message"),
    [
        ("crash", "crash", "RuntimeError: shape mismatch in layer 3"),
        ("oom", "out_of_memory", "killed by SIGKILL"),
        ("dies", "unsupported", "Synthetic acceptance not supported with CPU sampling"),
        ("hang", "hang", "/health did not answer 200 within 2 s"),
        ("mute", "hang", "no token came back within 2 s"),
    ],
)
def test_a_failed_start_names_its_cause_and_leaves_no_process(tmp_path: Path, behaviour: str, kind: str, message: str) -> None:
    with pytest.raises(BackendError, match=message) as error:
        start(tmp_path, behaviour, str(tmp_path / "pids"), timeout_s=2 if kind == "hang" else 30)
    assert error.value.kind == kind
    assert "\n" not in str(error.value)
    (pid,) = pids(tmp_path / "pids")
    assert not running(pid)


def test_a_command_that_does_not_exist_is_one_clear_line(tmp_path: Path) -> None:
    nowhere = Launch(argv=("/nowhere/python", "-m", "engine"))
    with pytest.raises(BackendError, match="cannot start fake: /nowhere/python: No such file or directory") as error:
        Server.start(nowhere, port=free_port(), folder=tmp_path, backend="fake")
    assert error.value.kind == "missing_command"


def test_a_long_log_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    with start(tmp_path, "chatty") as server:
        log = server.log()
    assert log.startswith("the very first line\n")
    assert log.endswith("the very last line\n")
    assert "bytes dropped" in log
    assert len(log) < LOG_HEAD_BYTES + 2 * LOG_TAIL_BYTES + 200


def test_files_of_a_launch_are_written_and_the_folder_is_filled_in(tmp_path: Path) -> None:
    port = free_port()
    argv = (sys.executable, "-S", str(FAKE), str(port), "echo", "{folder}/pids", "{folder}/sub/config.json")
    spec = Launch(argv=argv, env={"TEST_VARIABLE": "set to {folder}"}, files={"sub/config.json": '{"k": 4}'})
    with Server.start(spec, port=port, folder=tmp_path, backend="fake") as server:
        assert f'file holds {{"k": 4}} and variable set to {tmp_path}' in server.log()


def test_a_file_outside_the_folder_is_refused(tmp_path: Path) -> None:
    spec = Launch(argv=("true",), files={"../escape": "x"})
    with pytest.raises(BackendError, match=r"'\.\./escape' of the launch lies outside"):
        Server.start(spec, port=free_port(), folder=tmp_path / "trial", backend="fake")
    assert not (tmp_path / "escape").exists()


def test_progress_shows_seconds_and_the_last_line_of_the_log(tmp_path: Path) -> None:
    seen: list[tuple[float, str]] = []
    port = free_port()
    with pytest.raises(BackendError):
        Server.start(
            launch(port, "hang", timeout_s=2.5),
            port=port,
            folder=tmp_path,
            backend="fake",
            on_progress=lambda elapsed_s, line: seen.append((elapsed_s, line)),
        )
    assert len(seen) >= 2
    assert seen[0][0] < seen[1][0]
