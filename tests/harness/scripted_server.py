"""A server that answers each request with a script: raw bytes and pauses, as fine as a test needs them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from backends.types import Endpoint

Step = bytes | float  # bytes to send, or seconds to wait
STREAMS = Path(__file__).parents[1] / "data" / "streams"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def stream(*parts: Step, end: bytes = END) -> list[Step]:
    """A response whose body is `parts`, each one HTTP chunk."""
    return [HEAD, *(chunk(p) if isinstance(p, bytes) else p for p in parts), end]


def stream_file(name: str, *, pause_scale: float = 0.1) -> list[Step]:
    """A response from tests/data/streams; its pauses of N ms are scaled."""
    pieces = re.split(r"^#@(\d+)\n", (STREAMS / name).read_text(), flags=re.MULTILINE)
    parts: list[Step] = [int(p) / 1000 * pause_scale if p.isdigit() else p.encode() for p in pieces]
    return stream(*(p for p in parts if p != b""))


def event(text: str, **more: object) -> bytes:
    import json

    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text, **more}]}).encode() + b"\n\n"


@asynccontextmanager
async def scripted(answer: Callable[[int], Sequence[Step]], *, backend: str = "openai") -> AsyncIterator[Endpoint]:
    """Serves `answer(n)` to the nth POST, counted from 0; GET is 404. After a script without an end the connection is cut."""
    count = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
                await reader.readexactly(int(length[1]) if length else 0)
                if not head.startswith(b"POST"):
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                    continue
                steps = answer(count)
                count += 1
                for step in steps:
                    if isinstance(step, bytes):
                        writer.write(step)
                        await writer.drain()
                    else:
                        await asyncio.sleep(step)
                if not steps or steps[-1] != END:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield Endpoint(f"http://127.0.0.1:{port}", "m", backend)
