"""Servers that take turns in the benchmarks: their own clocks."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from itertools import pairwise

import psutil
import pytest

from benchmarks.turns import SLICE_S, _in_own_time, _take_turns
from harness.replay import Replay
from harness.types import Load, RequestRecord

BUSY = "while True: pass"


def test_a_servers_clock_stands_still_outside_its_slices() -> None:
    record = RequestRecord(
        0, "completed", intended_s=0.1, sent_s=0.15, first_token_s=0.55, last_token_s=0.9, chunk_s=(0.55, 0.9), output_tokens=3
    )
    run = Replay(Load("closed", "t", concurrency=1), [record], [], (0.1, 0.9), 1.0, None, start_clock_s=100.0)
    moved = _in_own_time(run, [100.0, 100.2, 100.5, 100.6, 100.8, 101.0])  # runs in 0-0.2, 0.5-0.6 and 0.8-1.0
    [own] = moved.records
    assert (own.intended_s, own.sent_s, own.first_token_s) == pytest.approx((0.1, 0.15, 0.25))
    assert own.last_token_s == pytest.approx(0.4)
    assert own.e2e_s == pytest.approx(0.3)
    assert own.chunk_s == pytest.approx((0.25, 0.4))
    assert (moved.window_s[0], moved.window_s[1], moved.wall_s) == pytest.approx((0.1, 0.4, 0.5))


def test_one_process_runs_at_a_time_and_one_that_has_finished_gets_no_slices() -> None:
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(3)]
    slices: dict[int, list[float]] = {process.pid: [] for process in busy}
    live = set(slices)

    async def for_a_while() -> None:
        turns = asyncio.ensure_future(_take_turns(slices, live))
        await asyncio.sleep(9 * SLICE_S)
        live.discard(busy[0].pid)
        await asyncio.sleep(6 * SLICE_S)
        turns.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await turns

    try:
        until = time.monotonic() + 9 * SLICE_S
        asyncio.run(for_a_while())
        every = sorted((begin, end) for mine in slices.values() for begin, end in zip(mine[::2], mine[1::2], strict=True))
        assert all(end <= begin for (_, end), (begin, _) in pairwise(every))
        assert slices[busy[0].pid][-1] < until + 2 * SLICE_S
        assert all(len(mine) > len(slices[busy[0].pid]) for pid, mine in slices.items() if pid != busy[0].pid)
        assert all(psutil.Process(process.pid).status() != psutil.STATUS_STOPPED for process in busy)
    finally:
        for process in busy:
            process.kill()
            process.wait()
