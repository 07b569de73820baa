"""One request after another against scripted streams, each with the answer that is known from the script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from scripted_server import END, HEAD, Step, chunk, event, scripted, stream, stream_file

from backends.types import BackendError, Endpoint
from harness.client import ReplayOptions, call_of, request_seed, unseen
from harness.measure import SCHEMA, measure, records_table
from harness.replay import Replay, replay
from harness.types import Load, RequestRecord
from harness.wire import Origin, Pool, get
from workloads.types import Request, WorkloadError

OPEN = Load("trace", "t")


def run(
    answer: Callable[[int], Sequence[Step]], count: int = 1, *, load: Load = OPEN, gap_s: float = 0.0, **options: object
) -> Replay:
    async def main() -> Replay:
        async with scripted(answer) as endpoint:
            requests = [Request(i, i * gap_s, prompt="hi", max_tokens=8) for i in range(count)]
            return await replay(endpoint, requests, load, ReplayOptions(**{"request_deadline_s": 5.0, **options}))  # type: ignore[arg-type]

    return asyncio.run(main())


def one(*steps: Step, **options: object) -> RequestRecord:
    return run(lambda _: steps, **options).records[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "status", "failure", "chunk_tokens", "tokens", "source"),
    [
        ("sse_role_then_tokens.txt", "completed", None, (1, 1, 1), 3, "usage"),
        ("sse_spec_bursts.txt", "completed", None, (1, 3, 1, 4), 9, "usage"),
        ("sse_reasoning_first.txt", "completed", None, (), 40, "usage"),
        ("sse_no_usage.txt", "completed", None, (), 4, "tokenizer"),
        ("sse_error_event_200.txt", "failed", "error_event", (), None, None),
    ],
)
def test_known_streams(
    name: str, status: str, failure: str | None, chunk_tokens: tuple[int, ...], tokens: int | None, source: str | None
) -> None:
    record = one(*stream_file(name), count_tokens=lambda text: len(text.split()))
    assert (record.status, record.failure, record.output_tokens, record.tokens_source) == (status, failure, tokens, source)
    assert record.chunk_tokens == chunk_tokens


def test_ttft_is_the_first_token_and_not_the_role_chunk() -> None:
    record = one(*stream_file("sse_role_then_tokens.txt", pause_scale=0.4))
    assert record.ttft_s is not None
    assert record.ttft_s > 0.2  # the role came at once, the first token after 0.2 s


@pytest.mark.parametrize(
    ("steps", "status", "failure"),
    [
        (stream(event("a"), b"data: [DONE]\n\n"), "completed", None),
        (stream(event("a", finish_reason="stop")), "completed", None),  # no [DONE], but nothing is missing
        (stream(event("a")), "failed", "truncated"),
        ((HEAD, chunk(event("a", finish_reason="stop"))), "failed", "truncated"),  # the connection broke
        ((HEAD, chunk(event("a") + b"data: [DONE]\n\n")), "completed", None),
        ((b"",), "failed", "disconnect"),
        ((b"nonsense\r\n\r\n",), "failed", "protocol"),
        (stream(b"data: {broken\n\n"), "failed", "bad_json"),
        (stream(b"data: [1]\n\n"), "failed", "bad_json"),
        ((b"HTTP/1.1 429 Slow\r\nContent-Length: 2\r\n\r\n{}",), "refused", "http_429"),
        ((b"HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\n{}",), "failed", "http_503"),
        ((b"HTTP/1.0 200 OK\r\n\r\n" + event("a", finish_reason="stop"),), "completed", None),  # ends with its connection
    ],
)
def test_every_request_ends_in_one_way(steps: Sequence[Step], status: str, failure: str | None) -> None:
    record = one(*steps)
    assert (record.status, record.failure) == (status, failure)


def test_a_silent_server_is_a_timeout_and_the_end_of_a_load_cancels() -> None:
    assert one(HEAD, 3.0, request_deadline_s=0.2).failure == "timeout"
    record = one(HEAD, 3.0, load_deadline_s=0.2)
    assert (record.status, record.failure) == ("cancelled", "cancelled")


def test_no_server_is_one_clear_line() -> None:
    endpoint = Endpoint("http://127.0.0.1:1", "m", "openai")
    with pytest.raises(BackendError, match="no server answers at"):
        asyncio.run(replay(endpoint, [Request(0, 0.0, prompt="x")], OPEN, ReplayOptions()))


def test_latency_counts_from_the_intended_time_through_a_stall() -> None:
    """40 requests 10 ms apart; the event loop, and so the client's sending, stops for 0.3 s at the tenth."""
    import time

    def answer(number: int) -> Sequence[Step]:
        if number == 10:
            time.sleep(0.3)
        return stream(event("a", finish_reason="stop"))

    result = run(answer, 40, gap_s=0.01)
    intended = np.array([r.ttft_s for r in result.records])
    from_send = np.array([(r.first_token_s or 0) - (r.sent_s or 0) for r in result.records])
    waited = 0.3 - 0.01 * np.arange(1, 25)  # of the requests that were due meanwhile
    assert (intended[11:35] >= waited - 0.02).all()
    assert np.median(from_send[13:35]) < 0.1  # what a client that counts from the send would have reported
    assert "sent late" in (measure(result, OPEN).invalid or "")


def test_a_closed_loop_measures_each_request_once_at_full_concurrency() -> None:
    busy: list[int] = []
    result = run(lambda n: busy.append(n) or stream(0.02, event("a", finish_reason="stop")), 9, load=Load("closed", "t", 3))
    assert [r.index for r in result.records] == list(range(9))
    assert len(result.lead) >= 3
    assert len(busy) == 9 + len(result.lead)


def test_failures_are_counted_and_stay_out_of_latencies() -> None:
    bad = (b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", END[:0])
    result = run(lambda n: bad if n % 2 else stream(event("a", finish_reason="stop")), 4, gap_s=0.02)
    measured = measure(result, OPEN)
    assert measured.requests == {
        "sent": 4, "completed": 2, "failed": 2, "refused": 0, "cancelled": 0, "failures": {"http_500": 2},
    }  # fmt: skip
    table = records_table(result.records)
    assert table.schema == SCHEMA
    assert table["e2e_s"].null_count == 2


def test_a_call_keeps_the_request_and_caps_its_length() -> None:
    request = Request(3, 0.0, prompt="p", max_tokens=100, output_tokens=7, sampling={"temperature": 0.7})
    endpoint = Endpoint("http://h", "m", "vllm")
    fields = call_of(request, endpoint, ReplayOptions(max_output_tokens=50, seed=1)).fields
    assert (fields["max_tokens"], fields["seed"], fields["return_token_ids"]) == (50, request_seed(1, 3), True)
    exact = call_of(request, endpoint, ReplayOptions(output_length="recorded")).fields
    assert (exact["max_tokens"], exact["ignore_eos"]) == (7, True)
    assert (unseen(request, "x").prompt or "")[0] != "p"
    with pytest.raises(WorkloadError, match="no text"):
        call_of(Request(0, 0.0), endpoint, ReplayOptions())


def test_reading_a_page_can_be_cancelled_at_every_turn_of_the_loop() -> None:
    """A cancellation that is lost leaves the sampling of gauges running for ever, and the load never ends."""

    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(10)
        writer.close()

    async def lost(turns: int) -> bool:
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        pool = Pool(Origin.of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        pool.give_back(await pool.take())  # an idle connection: taking it ends at once
        reading = asyncio.ensure_future(get(pool, "/metrics"))
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading], timeout=0.5)
        was_lost = not reading.cancelled()
        pool.close()
        server.close()
        return was_lost

    assert [turns for turns in range(6) if asyncio.run(lost(turns))] == []
