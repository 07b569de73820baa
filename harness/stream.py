"""What one streamed completion says: when tokens arrived, how many, and how it ended.

TTFT is the arrival of the first chunk that carries a token: content, reasoning, a tool call, or token ids whose text is still
held back. The role chunk and the usage chunk carry none. A chunk may hold several tokens; how many is known from its token
ids, from usage on every chunk, or where as many chunks as tokens came. Elsewhere it is left unknown, not divided evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import orjson

from harness.sse import EventParser

CountTokens = Callable[[str], int]
"""Tokens of a text, without special tokens. Called once for a whole output, never for a chunk."""


class StreamReader:
    """Reads one response body. `failure` is None or the kind of failure: error_event, bad_json, truncated, ..."""

    __slots__ = (
        "_parser",
        "_sizes",
        "_usages",
        "chunk_s",
        "done",
        "failure",
        "finish_reason",
        "input_tokens",
        "message",
        "text_parts",
        "token_ids",
        "usage_tokens",
    )

    def __init__(self) -> None:
        self._parser = EventParser()
        self.chunk_s: list[float] = []  # arrival of each chunk that carried tokens
        self._sizes: list[int | None] = []  # its number of token ids
        self._usages: list[int | None] = []  # completion tokens so far, as the chunk says
        self.token_ids: list[int] = []
        self.text_parts: list[str] = []
        self.usage_tokens: int | None = None
        self.input_tokens: int | None = None
        self.finish_reason: str | None = None
        self.failure: str | None = None
        self.message: str | None = None  # the server's own words on a failure
        self.done = False

    def feed(self, now_s: float, data: bytes) -> None:
        """Bytes that were read from the socket at `now_s`."""
        for name, event in self._parser.feed(data):
            self._event(now_s, name, event)

    def close(self, now_s: float, *, clean: bool) -> None:
        """The body ended; `clean` unless the connection broke before the response was complete.

        A stream is complete with ``[DONE]``, or without it where it says why it finished and HTTP itself ended as it should.
        """
        for name, event in self._parser.close():
            if name or event == b"[DONE]" or clean:  # what a broken connection left of an event is no event
                self._event(now_s, name, event)
        if self.failure is None and not self.done and not (clean and self.finish_reason):
            self.failure = "truncated"

    def _event(self, now_s: float, name: bytes, data: bytes) -> None:
        if self.done or self.failure:
            return
        if data == b"[DONE]":
            self.done = True
            return
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            chunk = None
        if name == b"error" or (isinstance(chunk, dict) and (chunk.get("error") or chunk.get("object") == "error")):
            self.failure, self.message = "error_event", error_message(chunk, data)
        else:
            try:
                self._chunk(now_s, chunk)
            except (AttributeError, TypeError):  # not JSON, or JSON of another shape
                self.failure, self.message = "bad_json", data[:200].decode(errors="replace")

    def _chunk(self, now_s: float, chunk: Any) -> None:
        usage = chunk.get("usage")
        so_far = self._read_usage(usage) if usage else None
        choices = chunk.get("choices")
        if not choices:
            return
        size: int | None = None
        carries = False
        for choice in choices:
            ids = choice.get("token_ids")
            if ids is not None:
                size = (size or 0) + len(ids)
                self.token_ids += ids
            carries |= self._read_text(choice) or bool(ids)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        # An end-of-sequence token has no text: after the first token, usage that grows shows it.
        carries |= so_far is not None and bool(self._usages) and so_far > (self._usages[-1] or so_far)
        if carries:
            self.chunk_s.append(now_s)
            self._sizes.append(size)
            self._usages.append(so_far)

    def _read_usage(self, usage: Mapping[str, Any]) -> int | None:
        completion = usage.get("completion_tokens")
        if completion is not None:
            self.usage_tokens = completion
        prompt = usage.get("prompt_tokens")
        if prompt is not None:
            self.input_tokens = prompt
        return completion

    def _read_text(self, choice: Mapping[str, Any]) -> bool:
        """Collects the choice's text; whether there was any."""
        delta = choice.get("delta")
        if delta is None:
            text = choice.get("text")
            if text:
                self.text_parts.append(text)
            return bool(text)
        found = False
        # Some servers send reasoning under both names at once; it is one text.
        for text in (delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content"), delta.get("refusal")):
            if text:
                self.text_parts.append(text)
                found = True
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            for text in (function.get("name"), function.get("arguments")):
                if text:
                    self.text_parts.append(text)
                    found = True
        return found

    @property
    def text(self) -> str:
        return "".join(self.text_parts)

    def output_tokens(self, count: CountTokens | None) -> tuple[int | None, str | None]:
        """Number of output tokens and where it is from: usage, token_ids or tokenizer; (None, None) where nothing tells."""
        if self.usage_tokens is not None and (self.usage_tokens > 0 or not self.chunk_s):
            return self.usage_tokens, "usage"
        if self.token_ids:
            return len(self.token_ids), "token_ids"
        if not self.chunk_s:
            return (0, "usage") if self.usage_tokens == 0 else (None, None)
        if count is not None:
            return count(self.text), "tokenizer"
        return None, None

    def chunk_tokens(self, total: int | None) -> tuple[int, ...]:
        """Tokens of each chunk in `chunk_s`; empty where that cannot be proved."""
        sizes = [size for size in self._sizes if size is not None]
        if sizes and len(sizes) == len(self._sizes):
            return tuple(sizes)
        usages = [0, *(usage for usage in self._usages if usage is not None)]
        steps = [after - before for before, after in pairwise(usages)]
        if len(steps) == len(self._usages) and all(step > 0 for step in steps):
            return tuple(steps)
        if total is not None and len(self.chunk_s) == 1:
            return (total,)
        if total is not None and len(self.chunk_s) == total:  # a chunk holds at least one token
            return (1,) * total
        return ()


def error_message(body: Any, raw: bytes) -> str:
    """The message of an OpenAI-style error, else the beginning of what was sent."""
    error = body.get("error", body) if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message) if message else raw[:200].decode(errors="replace")
