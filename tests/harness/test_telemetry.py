"""What is read of a server's statistics page while a load runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from backends.types import Endpoint
from harness import telemetry as module
from harness.telemetry import Telemetry
from harness.wire import Origin, Pool


def page(generated: int, running: int = 1, start: int = 7) -> str:
    return (
        f"process_start_time_seconds {start}\n"
        f'vllm:generation_tokens_total{{model="m"}} {generated}\n'
        f'vllm:num_requests_running{{model="m"}} {running}\n'
        f'vllm:num_requests_waiting{{model="m"}} 3\n'
        f'vllm:kv_cache_usage_perc{{model="m"}} 0.25\n'
        "vllm:e2e_request_latency_seconds_bucket 5\n"
    )


@asynccontextmanager
async def serving(pages: Callable[[int], str | None], backend: str = "vllm") -> AsyncIterator[tuple[Telemetry, list[str]]]:
    """A telemetry of a server that shows `pages(n)` to the nth GET (None: 404), and the paths that were asked for."""
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                asked.append(head.split()[1].decode())
                found = pages(len(asked) - 1)
                status, body = ("200 OK", found) if found is not None else ("404 Not Found", "")
                writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        found = Telemetry(Endpoint(url, "m", backend), Pool(Origin.of(url)))
        yield found, asked
        found.close()


def test_counts_and_gauges_are_read_from_the_dialect_s_own_path() -> None:
    async def check() -> None:
        async with serving(lambda _: page(40)) as (telemetry, asked):
            counters, gauges = await telemetry.read() or (None, None)
            assert counters is not None
            assert gauges is not None
            assert (counters.generated_tokens, gauges.running, gauges.waiting, gauges.kv_use) == (40, 1, 3, 0.25)
            assert asked == ["/metrics"]
        async with serving(lambda _: "", "tensorrt_llm") as (telemetry, asked):
            await telemetry.read()
            assert asked == ["/prometheus/metrics"]

    asyncio.run(check())


@pytest.mark.parametrize("backend", ["vllm", "somebody_else"])
def test_without_a_page_or_a_dialect_nothing_is_known_and_nothing_fails(backend: str) -> None:
    async def check() -> None:
        async with serving(lambda _: None, backend) as (telemetry, asked):
            assert await telemetry.read() is None
            assert await telemetry.settled() is None
            await asyncio.wait_for(telemetry.sample(), 1)
            assert (telemetry.samples, telemetry.broken) == ([], None)
            assert bool(asked) == (backend == "vllm")

    asyncio.run(check())


def test_the_last_counts_are_awaited_until_two_readings_agree_and_nothing_runs() -> None:
    pages = [page(10), page(20), page(20), page(30, running=0), page(30, running=0), page(99)]

    async def check() -> None:
        async with serving(lambda n: pages[n]) as (telemetry, asked):
            counters, _ = await telemetry.settled() or (None, None)
            assert counters is not None
            assert (counters.generated_tokens, len(asked)) == (30, 5)

    asyncio.run(check())


def test_a_server_that_never_settles_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLE_S", 0.2)

    async def check() -> None:
        async with serving(page) as (telemetry, asked):
            assert await asyncio.wait_for(telemetry.settled(), 2) is not None
            assert len(asked) > 1

    asyncio.run(check())


@pytest.mark.parametrize(
    ("later", "reason"),
    [(page(5), "generated_tokens fell from 50 to 5"), (page(60, start=8), "the server restarted"), (page(60), None)],
)
def test_a_reset_in_the_middle_is_seen_though_the_end_looks_sound(
    monkeypatch: pytest.MonkeyPatch, later: str, reason: str | None
) -> None:
    monkeypatch.setattr(module, "SAMPLE_PERIOD_S", 0.01)
    pages = [page(50), later, page(70), page(80)]

    async def check() -> None:
        async with serving(lambda n: pages[min(n, 3)]) as (telemetry, asked):
            task = asyncio.create_task(telemetry.sample())
            while len(asked) < 6:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (telemetry.broken is None) == (reason is None)
            assert (reason or "") in (telemetry.broken or "")
            assert telemetry.samples[0][1].running == 1
            assert telemetry.samples == sorted(telemetry.samples, key=lambda sample: sample[0])

    asyncio.run(check())
