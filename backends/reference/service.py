"""The engine behind an HTTP server: it steps in a thread of its own, requests come and tokens go through asyncio queues."""

from __future__ import annotations

import asyncio
import queue
import threading
import traceback
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from backends.reference.engine import Engine
from backends.reference.metrics import render
from backends.reference.sequence import Sequence as Running
from backends.serving import GenerationRequest, RequestError, TokenChunk

RESET_TIMEOUT_S = 10.0
"""A failed engine takes no messages any more."""


class _Stream:
    """Where one request's chunks go."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.loop = asyncio.get_running_loop()
        self.chunks: asyncio.Queue[TokenChunk | Exception] = asyncio.Queue()
        self.sequence: Running | None = None  # set and used by the engine's thread only


class Service:
    """`backends.serving.ServedEngine` over an `Engine`. `ready` turns true when the thread has warmed the engine up."""

    max_logprobs = 20

    def __init__(self, engine: Engine, model: str) -> None:
        self.model = model
        self.max_model_len = engine.max_model_len
        self._engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None ends the thread
        self._streams: dict[int, _Stream] = {}
        self._warm = False
        self._accepting = True
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        return self._warm and self._accepting

    def encode(self, text: str) -> list[int]:
        return self._engine.tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        return self._engine.tokenizer.encode_chat(messages, tools)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._engine.tokenizer.decode(token_ids)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """Chunks as the engine emits them; closing the iterator frees the sequence.

        Raises:
            RequestError: the request cannot be served.
            RuntimeError: the engine failed.
        """
        if not self._accepting:
            raise RequestError("the engine is shutting down")
        self._engine.check(request)
        stream = _Stream(request)
        self._inbox.put(lambda: self._add(stream))
        finished = False
        try:
            while not finished:
                chunk = await stream.chunks.get()
                if isinstance(chunk, Exception):
                    raise chunk
                finished = chunk.finish_reason is not None
                yield chunk
        finally:
            if not finished:
                self._inbox.put(lambda: self._cancel(stream))

    def metrics_page(self) -> str:
        return render(self._engine, self.model)

    async def reset_prefix_cache(self) -> None:
        """``POST /reset_prefix_cache``, as vLLM has it in its development mode."""
        done = threading.Event()

        def reset() -> None:
            self._engine.reset_prefix_cache()
            done.set()

        self._inbox.put(reset)
        await asyncio.to_thread(done.wait, RESET_TIMEOUT_S)

    async def drain(self) -> None:
        """Refuse new requests, finish the running ones, end the thread."""
        self._accepting = False
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        """The engine's thread. A failure ends every request with it and leaves the service not ready."""
        engine = self._engine
        draining = False
        try:
            engine.warm_up()
            self._warm = True
            while engine.has_work or not draining:
                draining |= self._take_messages(wait=not engine.has_work)
                if engine.has_work:
                    outputs = engine.step()
                    self._deliver(
                        [(o.sequence.id, TokenChunk(o.token_ids, o.text, o.finish_reason, o.logprobs)) for o in outputs]
                    )
        except Exception as failure:
            traceback.print_exc()
            self._accepting = False
            self._deliver([(key, RuntimeError(f"the engine failed: {failure}")) for key in self._streams])

    def _take_messages(self, *, wait: bool) -> bool:
        """Run what came in, waiting for a first message if there is nothing else to do. True once asked to drain."""
        draining = False
        while wait or not self._inbox.empty():
            message = self._inbox.get()
            wait = False
            if message is None:
                draining = True
            else:
                message()
        return draining

    def _add(self, stream: _Stream) -> None:
        stream.sequence = self._engine.add(stream.request)
        self._streams[stream.sequence.id] = stream

    def _cancel(self, stream: _Stream) -> None:
        if stream.sequence is not None and self._streams.pop(stream.sequence.id, None) is not None:
            self._engine.cancel(stream.sequence)

    def _deliver(self, items: list[tuple[int, TokenChunk | Exception]]) -> None:
        """Hand a step's chunks over in one call for each event loop (there is one, outside tests)."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, TokenChunk | Exception]]] = {}
        for key, item in items:
            stream = self._streams[key]
            by_loop.setdefault(stream.loop, []).append((stream, item))
            if isinstance(item, TokenChunk) and item.finish_reason is not None:
                del self._streams[key]
        for loop, chunks in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_put_all, chunks)


def _put_all(chunks: list[tuple[_Stream, TokenChunk | Exception]]) -> None:
    for stream, item in chunks:
        stream.chunks.put_nowait(item)
