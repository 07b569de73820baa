"""The wire: keep-alive HTTP/1.1 connections whose responses are stamped at the socket read.

A request is one write of bytes that were prepared before the load began. Nothing is sent twice: a connection that breaks fails
its request.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

IDLE_LIMIT_S = 2.0  # servers close idle connections after 5 s and more (uvicorn); one about to be closed is not used


class Body(Protocol):
    """Takes a response body as it arrives."""

    def feed(self, now_s: float, data: bytes) -> None: ...

    def close(self, now_s: float, *, clean: bool) -> None: ...


class Collected:
    """A body kept whole."""

    def __init__(self) -> None:
        self.data = b""

    def feed(self, now_s: float, data: bytes) -> None:
        self.data += data

    def close(self, now_s: float, *, clean: bool) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a server listens."""

    host: str
    port: int
    tls: bool
    path: str  # in front of /v1, without a slash at its end

    @classmethod
    def of(cls, base_url: str) -> Origin:
        """
        Raises:
            ValueError: not an http(s) URL.
        """
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"'{base_url}' is not an http:// or https:// address")
        tls = url.scheme == "https"
        return cls(url.hostname, url.port or (443 if tls else 80), tls, url.path.rstrip("/"))


class Exchange:
    """One request and its response. `failure` is None or why there is no whole response: disconnect, timeout, protocol."""

    __slots__ = ("body", "end_s", "ended", "error_body", "failure", "sent_s", "status")

    def __init__(self, body: Body, ended: asyncio.Future[None]) -> None:
        self.body = body  # of a 200 response
        self.error_body = Collected()  # of any other
        self.ended = ended
        self.sent_s: float | None = None
        self.end_s: float | None = None
        self.status: int | None = None
        self.failure: str | None = None


class Connection(asyncio.Protocol):
    """One connection, used by one exchange at a time."""

    def __init__(self) -> None:
        self.idle_since_s = time.monotonic()
        self.closed = False
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._now_s = 0.0
        self._framed = False  # the response says where it ends; without that, the end of the connection is its end
        self._parser = httptools.HttpResponseParser(self)

    def send(self, exchange: Exchange, payload: bytes) -> None:
        assert self._transport is not None, "a connection is handed out after it was made"
        self._exchange = exchange
        self._parser = httptools.HttpResponseParser(self)
        self._framed = False
        exchange.sent_s = time.monotonic()
        self._transport.write(payload)

    def abort(self, failure: str) -> None:
        """End the exchange in progress, if there is one, and the connection."""
        self._end(failure, clean=False)
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are not its subclasses

    def data_received(self, data: bytes) -> None:
        self._now_s = time.monotonic()
        if self._exchange is None:  # bytes that nobody asked for
            self.abort("protocol")
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.abort("protocol")

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._now_s = time.monotonic()
        exchange = self._exchange
        if exchange is not None and exchange.status is not None and not self._framed and exc is None:
            self._end(None, clean=True)
        else:
            self._end("disconnect", clean=False)

    # httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is not None:
            (exchange.body if exchange.status == 200 else exchange.error_body).feed(self._now_s, data)

    def on_message_complete(self) -> None:
        keep = self._parser.should_keep_alive()
        self._end(None, clean=True)
        if not keep and self._transport is not None:
            self.closed = True
            self._transport.close()

    def _end(self, failure: str | None, *, clean: bool) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        exchange.failure = failure
        exchange.end_s = self.idle_since_s = self._now_s = time.monotonic() if failure else self._now_s
        exchange.body.close(self._now_s, clean=clean)
        if not exchange.ended.done():
            exchange.ended.set_result(None)


class Pool:
    """Connections to one server. As many are open as there are exchanges at once; an idle one is used again."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._ssl = ssl.create_default_context() if origin.tls else None

    async def take(self) -> Connection:
        """An open connection.

        Raises:
            OSError: none can be had.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.closed:
                continue
            if time.monotonic() - connection.idle_since_s < IDLE_LIMIT_S:
                self._busy.add(connection)
                return connection
            connection.abort("idle")
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self.origin.host, self.origin.port, ssl=self._ssl)
        self._busy.add(connection)
        return connection

    def give_back(self, connection: Connection) -> None:
        self._busy.discard(connection)
        if not connection.closed:
            self._idle.append(connection)

    def close(self) -> None:
        for connection in (*self._idle, *self._busy):
            connection.abort("cancelled")
        self._idle.clear()
        self._busy.clear()


async def exchange_on(connection: Connection, payload: bytes, exchange: Exchange, deadline_s: float) -> None:
    """Send `payload` now and wait for the end of `exchange`, at most `deadline_s`."""
    timer = asyncio.get_running_loop().call_later(deadline_s, connection.abort, "timeout")
    connection.send(exchange, payload)
    try:
        await exchange.ended
    except asyncio.CancelledError:
        connection.abort("cancelled")
        raise
    finally:
        timer.cancel()


def render(method: str, path: str, origin: Origin, body: bytes = b"", headers: tuple[tuple[str, str], ...] = ()) -> bytes:
    """An HTTP/1.1 request as bytes."""
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    lines = [f"{method} {origin.path}{path} HTTP/1.1", f"Host: {host}:{origin.port}"]
    if method == "POST":
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


async def get(pool: Pool, path: str, *, method: str = "GET", deadline_s: float = 5.0) -> str | None:
    """The body of a page that answers 200, else None."""
    body = Collected()
    try:
        async with asyncio.timeout(deadline_s):  # not wait_for: Python 3.11's loses a cancellation that comes as it ends
            connection = await pool.take()
    except (OSError, TimeoutError):
        return None
    exchange = Exchange(body, asyncio.get_running_loop().create_future())
    await exchange_on(connection, render(method, path, pool.origin), exchange, deadline_s)
    pool.give_back(connection)
    return body.data.decode(errors="replace") if exchange.failure is None and exchange.status == 200 else None
