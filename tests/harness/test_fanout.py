"""One load from several client processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest

from backends.types import BackendError, Endpoint
from harness.client import ReplayOptions
from harness.fanout import more_processes
from harness.replay import Replay, replay
from harness.types import Load
from tests.harness.scripted_server import Step, event, scripted, stream
from workloads.types import Request

CLOSED = Load("closed", "t", 3)


def answer(_: int) -> list[Step]:
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}\n\n'
    return stream(event("a"), 0.02, event("b"), usage, b"data: [DONE]\n\n")


def run(load: Load, processes: int, serve: Callable[[int], list[Step]] = answer) -> Replay:
    requests = [Request(10 + i, 0.05 * i, prompt=f"p{i}", max_tokens=2, session_id=f"s{i}") for i in range(7)]

    async def go() -> Replay:
        async with scripted(serve) as endpoint:
            return await replay(endpoint, requests, load, ReplayOptions(processes=processes))

    return asyncio.run(go())


def test_an_open_loop_keeps_its_schedule_and_its_order() -> None:
    found = run(Load("trace", "t", time_scale=2.0), 2)
    assert [r.index for r in found.records] == list(range(10, 17))
    assert [r.session for r in found.records] == [f"s{i}" for i in range(7)]
    assert [r.intended_s for r in found.records] == pytest.approx([0.1 * i for i in range(7)])
    assert all(r.status == "completed" and r.output_tokens == 2 for r in found.records)
    assert all(r.sent_s is not None and r.sent_s >= r.intended_s for r in found.records)
    assert "sent from 2 client processes, since one core could not hold the load" in found.warnings
    assert found.client_busy > 0


def test_a_closed_loop_shares_its_slots_out() -> None:
    found = run(CLOSED, 2)
    assert len(found.records) == 7
    busy = [(r.sent_s or 0.0, r.last_token_s or 0.0) for r in (*found.records, *found.lead)]
    at_once = max(sum(a <= t < b for a, b in busy) for t, _ in busy)
    assert 2 <= at_once <= 3
    assert len(found.lead) >= 3  # every slot has its lead-in


def test_a_process_that_fails_says_why() -> None:
    async def go() -> None:
        endpoint = Endpoint("http://127.0.0.1:9", "m", "openai")
        await replay(endpoint, [Request(i, None, prompt="x") for i in range(4)], CLOSED, ReplayOptions(processes=2))

    with pytest.raises(BackendError, match=r"a client process failed: .*no server answers"):
        asyncio.run(go())


def test_processes_are_added_only_where_one_was_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert more_processes(CLOSED, 0.5, 1) == 1
    assert more_processes(CLOSED, 0.97, 1) == 2
    assert more_processes(Load("closed", "t", 1), 1.0, 1) == 1  # one slot cannot be shared
    assert more_processes(Load("trace", "t"), 1.0, 4) == 5
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert more_processes(Load("trace", "t"), 1.0, 1) == 1
