"""One load from several client processes, for loads that fill one core of the client.

Every process sends a share of the requests (each nth in open loop; of a closed loop also a share of the slots) and counts time from
the same moment of the monotonic clock, which all processes of a machine share. Data goes between them as JSON.

    python -m harness.fanout    (a job on standard input, then the start; "ready" and then the records on standard output)
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson

from backends.types import BackendError, Endpoint
from harness.client import ReplayOptions
from harness.replay import Sent, send
from harness.types import Load, RequestRecord
from workloads.types import Request

FULL = 0.8
"""Share of its core from which on a client process is late with what it sends and reads."""
START_S = 0.3  # between the last process's readiness and the first request
READY = b"ready\n"
CHECKOUT = Path(__file__).resolve().parents[1]


def more_processes(load: Load, busy: float, processes: int) -> int:
    """How many client processes a load needs that kept its fullest one `busy`: as many as there are where none was full."""
    if busy < FULL:
        return processes
    most = min(os.cpu_count() or 1, load.concurrency or sys.maxsize)
    return min(most, max(processes + 1, math.ceil(processes * busy / FULL)))


async def send_from_several(endpoint: Endpoint, requests: Sequence[Request], load: Load, options: ReplayOptions) -> Sent:
    """`replay.send` from `options.processes` processes at once.

    Raises:
        BackendError: one of them failed.
    """
    if options.count_tokens is not None:
        raise ValueError("a tokenizer cannot be handed to other processes: count tokens from usage or token ids")
    count = options.processes
    jobs = [
        {
            "endpoint": asdict(endpoint),
            "requests": [asdict(request) for request in requests[i::count]],
            "load": asdict(load if load.concurrency is None else replace(load, concurrency=_share(load.concurrency, i, count))),
            "options": asdict(replace(options, processes=1)),
        }
        for i in range(count)
    ]
    processes = [await _start(job) for job in jobs]
    try:
        for process in processes:
            await _ready(process)
        times = [(r.arrival_s or 0.0) * (load.time_scale or 1.0) for r in requests] if load.mode == "trace" else [0.0]
        start_s = time.monotonic() + START_S - min(times)
        ended = await asyncio.gather(*(_records(process, start_s) for process in processes), return_exceptions=True)
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.communicate()
    parts = []
    for part in ended:
        if isinstance(part, BaseException):
            raise part
        parts.append(part)
    records: dict[int, RequestRecord] = {}
    for i, part in enumerate(parts):
        records |= {i + n * count: RequestRecord(**_tuples(row)) for n, row in enumerate(part["records"])}
    return Sent(
        records=[records[i] for i in range(len(requests))],
        lead=[RequestRecord(**_tuples(row)) for part in parts for row in part["lead"]],
        start_s=start_s,
        run_id=",".join(part["run_id"] for part in parts),
        words={kind: text for part in parts for kind, text in part["words"].items()},
        busy=max(part["busy"] for part in parts),
    )


def _share(users: int, number: int, processes: int) -> int:
    return users // processes + (number < users % processes)


async def _start(job: Mapping[str, Any]) -> Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "harness.fanout"),
        cwd=CHECKOUT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(orjson.dumps(job, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
    return process


async def _ready(process: Process) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    await process.stdin.drain()
    if await process.stdout.readline() != READY:
        await _records(process, 0.0)


async def _records(process: Process, start_s: float) -> dict[str, Any]:
    out, errors = await process.communicate(f"{start_s!r}\n".encode())
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise BackendError(f"a client process failed: {lines[-1] if lines else 'it said nothing'}", kind="crash")
    found: dict[str, Any] = orjson.loads(out)
    return found


def _tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}


def main() -> None:
    import uvloop

    job = orjson.loads(sys.stdin.buffer.readline())
    endpoint, requests = Endpoint(**job["endpoint"]), [Request(**request) for request in job["requests"]]
    load, options = Load(**job["load"]), ReplayOptions(**job["options"])
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    start_s = float(sys.stdin.buffer.readline())
    sent = uvloop.run(send(endpoint, requests, load, options, start_s=start_s))
    sys.stdout.buffer.write(orjson.dumps(asdict(sent)))


if __name__ == "__main__":
    main()
