"""A server that costs little: each request gets CHUNKS events, GAP_S apart, written from one timer. It logs when it wrote them.

``python -m benchmarks.paced_server PORT LOG``; SIGTERM ends it and writes LOG: for each request its id, the time at which its
first event was due and the time at which it was written (CLOCK_MONOTONIC).
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from pathlib import Path
from typing import ClassVar, cast

import orjson
import uvloop

CHUNKS, GAP_S = 64, 0.008
TICK_S = 0.001
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
REQUEST_ID = re.compile(rb"x-request-id: *(\S+)", re.IGNORECASE)
LOG: list[tuple[str, float, float, float]] = []  # request id, received, first event due, first event written


def framed(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(choices: list[dict[str, object]], **more: object) -> bytes:
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": choices}
    return framed(b"data: " + orjson.dumps({**head, **more}) + b"\n\n")


TOKEN = event([{"index": 0, "text": " token", "logprobs": None, "finish_reason": None}])
LAST = event([{"index": 0, "text": " token", "logprobs": None, "finish_reason": "length"}])
USAGE = {"prompt_tokens": 8, "completion_tokens": CHUNKS, "total_tokens": CHUNKS + 8}
END = event([], usage=USAGE) + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Answer(asyncio.Protocol):
    active: ClassVar[set[Answer]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = LENGTH.search(head)
        if len(body) < (int(length[1]) if length else 0):
            return
        self.buffer = b""
        if head.startswith(b"GET"):
            self.get(head)
            return
        request_id = REQUEST_ID.search(head)
        self.request_id = request_id[1].decode() if request_id else ""
        self.received_s = time.monotonic()
        self.sent = 0
        Answer.active.add(self)

    def get(self, head: bytes) -> None:
        body = (
            b'{"object": "list", "data": [{"id": "m", "object": "model"}]}' if b"/models" in head.split(b"\r\n")[0] else b"ok"
        )
        status = b"404 Not Found" if b"/metrics" in head.split(b"\r\n")[0] else b"200 OK"
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)
        )

    def connection_lost(self, exc: Exception | None) -> None:
        Answer.active.discard(self)

    def advance(self, now_s: float) -> None:
        due_s = self.received_s + GAP_S * (self.sent + 1)
        if now_s < due_s:
            return
        self.sent += 1
        data = LAST + END if self.sent == CHUNKS else TOKEN
        if self.sent == 1:
            LOG.append((self.request_id, self.received_s, due_s, time.monotonic()))
            data = HEAD + data
        self.transport.write(data)
        if self.sent == CHUNKS:
            Answer.active.discard(self)


async def main(port: int, log: Path) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Answer, "127.0.0.1", port)
    done = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, done.set)

    def tick() -> None:
        now_s = time.monotonic()
        for answer in tuple(Answer.active):
            answer.advance(now_s)
        loop.call_later(TICK_S, tick)

    tick()
    await done.wait()
    server.close()
    log.write_bytes(orjson.dumps(LOG))


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), Path(sys.argv[2])))
