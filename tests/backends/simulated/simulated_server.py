"""A simulated server on a thread of the test's process, and a client that keeps every packet."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn

from backends.openai_server import create_app, listen
from backends.simulated.dialects import DIALECTS
from backends.simulated.engine import SimulatedEngine
from backends.simulated.faults import parse_fault
from backends.simulated.truth import TruthLog
from backends.simulated.wire import Wire
from backends.simulated.world import World

PROMPT = "one two three four"


@dataclass
class Served:
    http: httpx.Client
    engine: SimulatedEngine
    log: io.BytesIO

    def truth(self, count: int) -> list[dict[str, Any]]:
        """The first `count` lines of the truth log, waited for."""
        for _ in range(500):
            lines = self.log.getvalue().splitlines()
            if len(lines) >= count:
                break
            time.sleep(0.01)
        return [json.loads(line) for line in lines]

    def ask(self, *, chat: bool = True, max_tokens: int = 8, **more: Any) -> Answer:
        """One streamed request; packets are kept as they come."""
        body: dict[str, Any] = {"model": "simulated", "max_tokens": max_tokens, "stream": True, "return_token_ids": True}
        body |= {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
        answer = Answer()
        path = "/v1/chat/completions" if chat else "/v1/completions"
        start = time.monotonic()
        with self.http.stream("POST", path, json={**body, **more}) as response:
            answer.status = response.status_code
            try:
                for packet in response.iter_raw():
                    answer.packets.append((time.monotonic() - start, packet))
            except httpx.TransportError as error:
                answer.broken = type(error).__name__
        return answer


@dataclass
class Answer:
    status: int = 0
    packets: list[tuple[float, bytes]] = field(default_factory=list)
    broken: str | None = None

    @property
    def body(self) -> bytes:
        return b"".join(packet for _, packet in self.packets)

    @property
    def events(self) -> list[Any]:
        """Parsed `data:` lines; comments and event names are left out."""
        lines = self.body.decode().replace("\r\n", "\n").split("\n")
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in data]

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [event["choices"][0] for event in self.events if event != "[DONE]" and event.get("choices")]

    @property
    def deltas(self) -> list[dict[str, Any]]:
        return [choice["delta"] for choice in self.choices if "role" not in choice["delta"]]


@contextmanager
def serving(
    world: World, *faults: str, variant: str = "draft_model", k: int = 4, dialect: str = "spectune", replicas: int = 1
) -> Iterator[Served]:
    parsed = tuple(parse_fault(fault) for fault in faults)
    engine = SimulatedEngine(world, variant=variant, k=k, dialect=DIALECTS[dialect], replicas=replicas, faults=parsed)
    log = io.BytesIO()
    sock = listen("127.0.0.1", 0)
    app = Wire(create_app(engine), TruthLog(log), parsed)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", http="httptools", loop="asyncio"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=20) as http:
            yield Served(http, engine, log)
    finally:
        server.should_exit = True
        thread.join(20)
