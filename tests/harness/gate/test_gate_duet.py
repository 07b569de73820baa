"""Two processes on two halves of the cores: never on the same, and each on both in turn."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from harness.gate.duet import EXCHANGE_S, Duet, duet_for
from harness.gate.sides import parse_side

CORES = sorted(os.sched_getaffinity(0))
THREADED = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); print(flush=True); time.sleep(60)"


@contextlib.contextmanager
def process() -> Iterator[int]:
    """A process of two threads with a child."""
    code = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {THREADED!r}]); {THREADED}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()
        started.stdout.readline()
        try:
            yield started.pid
        finally:
            for child in psutil.Process(started.pid).children():
                child.kill()
            started.kill()


def cores_of(pid: int) -> set[tuple[int, ...]]:
    root = psutil.Process(pid)
    threads = [thread.id for process in (root, *root.children()) for thread in process.threads()]
    assert len(threads) == 4
    return {tuple(sorted(os.sched_getaffinity(thread))) for thread in threads}


@pytest.mark.skipif(len(CORES) < 2, reason="one core cannot be shared out")
def test_all_threads_of_two_processes_exchange_their_halves() -> None:
    half = len(CORES) // 2
    duet = Duet((tuple(CORES[:half]), tuple(CORES[half : 2 * half])))

    async def watch(pids: tuple[int, int]) -> list[tuple[set[tuple[int, ...]], ...]]:
        exchanging = asyncio.ensure_future(duet.exchange(pids))
        seen = []
        for _ in range(8):
            await asyncio.sleep(EXCHANGE_S / 2.2)
            seen.append(tuple(cores_of(pid) for pid in pids))
        exchanging.cancel()
        return seen

    with process() as first, process() as second:
        seen = asyncio.run(watch((first, second)))
    low, high = ({half} for half in duet.halves)
    assert all(pair in ((low, high), (high, low)) for pair in seen)
    assert (low, high) in seen
    assert (high, low) in seen


def test_a_process_that_died_ends_no_gate() -> None:
    with process() as pid:
        pass
    duet = Duet(((CORES[0],), (CORES[-1],)))
    with pytest.raises(TimeoutError):  # it goes on until it is cancelled
        asyncio.run(asyncio.wait_for(duet.exchange((pid, pid)), 0.2))


def test_only_reference_engines_started_here_play_a_duet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {2, 3, 5, 7, 8})
    monkeypatch.setattr("harness.gate.duet.environment", lambda: {"gpu": None})
    ours = parse_side("--baseline", "--variant ngram --k 4")
    duet = duet_for(ours, ours)
    assert duet is not None
    assert duet.halves == ((2, 3), (5, 7))
    assert "2 of 4 cores" in duet.method
    assert duet_for(ours, parse_side("--candidate", "http://127.0.0.1:8000")) is None
    assert duet_for(ours, parse_side("--candidate", "--backend vllm --model m")) is None
    monkeypatch.setattr("harness.gate.duet.environment", lambda: {"gpu": "H100"})
    assert duet_for(ours, ours) is None
    monkeypatch.setattr("harness.gate.duet.environment", lambda: {"gpu": None})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    assert duet_for(ours, ours) is None
