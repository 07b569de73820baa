"""The bytes between the application and the socket: faults of a stream, and the log of what really went out when.

A raw ASGI layer around the OpenAI server. It reads the server's own events (`data: {...}`), changes them as the faults of the
request say, and notes the time of every write that carries tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backends.openai_server import error_body
from backends.simulated.faults import Fault
from backends.simulated.truth import CURRENT, RequestTruth, TruthLog

PATHS = ("/v1/completions", "/v1/chat/completions")
EVENT_STREAM = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}


class StopStreamError(BaseException):
    """Ends the application's response from within `send`. Not an Exception, so that no handler answers it."""


class Wire:
    """ASGI middleware, outermost."""

    def __init__(self, app: ASGIApp, log: TruthLog, faults: tuple[Fault, ...]) -> None:
        self._app, self._log, self._faults = app, log, faults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            return
        request_id = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
        truth = self._log.begin(request_id, self._faults)
        CURRENT.set(truth)
        response = _Response(truth, send, chat="chat" in scope["path"])
        truth.ended = "cancelled"
        try:
            failure = truth.fault("http_error")
            if failure is not None:
                await response.refuse(int(failure.value))
            else:
                if truth.fault("role_first"):
                    await response.open_with_role()
                await self._app(scope, receive, response.send)
            if truth.ended == "cancelled" and response.complete:
                truth.ended = "completed" if truth.status == 200 else "error"
        except StopStreamError:
            pass
        finally:
            self._log.end(truth)


class _Response:
    """One response on its way out."""

    def __init__(self, truth: RequestTruth, send: Send, *, chat: bool) -> None:
        self._truth, self._send, self._chat = truth, send, chat
        self._stream = False
        self._started = False
        self.complete = False
        self._token_events = 0
        self._held: list[dict[str, Any]] = []

    async def refuse(self, status: int) -> None:
        self._truth.status, self._truth.ended = status, "error"
        body = orjson.dumps(error_body("injected failure", kind="InternalServerError", code=status))
        await self._send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
        await self._send({"type": "http.response.body", "body": body})

    async def open_with_role(self) -> None:
        self._stream = self._started = True
        await self._send(EVENT_STREAM)
        if self._chat:
            delta = {"role": "assistant", "content": ""}
            await self._write([_render({"object": "chat.completion.chunk", "choices": [_choice({"delta": delta})]})])

    async def send(self, message: Message) -> None:
        """What the application calls to send."""
        if message["type"] == "http.response.start":
            self._truth.status = message["status"]
            self._stream = (b"content-type", b"text/event-stream; charset=utf-8") in message["headers"]
            if not self._started:
                self._started = True
                await self._send(message)
            return
        last = not message.get("more_body", False)
        if self._stream:
            await self._events(message["body"], last)
        else:
            self._log_tokens()
            await self._send(message)
        self.complete = self.complete or last

    async def _events(self, body: bytes, last: bool) -> None:
        out = []
        for raw in body.split(b"\n\n"):
            if raw == b"data: [DONE]":
                out += self._release()
                if not self._truth.fault("no_done"):
                    out.append(raw)
            elif raw:
                event = orjson.loads(raw.removeprefix(b"data: "))
                out += [_render(each) for each in self._edit(event)]
                if self._cuts():
                    await self._cut(out)
        await self._write(out, last)

    # Changes of events.

    def _edit(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        truth = self._truth
        if truth.fault("usage_missing") or truth.fault("usage_last_choice"):
            event.pop("usage", None)
            if event.get("choices") == []:
                return
        if not event.get("choices"):
            yield from self._flush()
            yield event
            return
        choice = event["choices"][0]
        if "role" in choice.get("delta", {}):
            if not truth.fault("role_first"):
                yield event
            return
        self._token_events += 1
        if truth.fault("usage_every") or (truth.fault("usage_last_choice") and choice["finish_reason"]):
            event["usage"] = self._usage()
        if self._chat:
            self._disguise(choice)
        bundle = truth.fault("bundled_first")
        if bundle is not None and self._token_events <= bundle.value:
            self._held.append(event)
            if self._token_events < bundle.value and not choice["finish_reason"]:
                return
            yield from self._flush()
            return
        yield event

    def _disguise(self, choice: dict[str, Any]) -> None:
        """Content as reasoning or as a tool call."""
        text = choice["delta"].get("content", "")
        reasoning = self._truth.fault("reasoning")
        if reasoning is not None and self._token_events <= reasoning.value:
            choice["delta"] = {("reasoning_content", "reasoning")[self._token_events % 2]: text}
        if self._truth.fault("tool_call"):
            call: dict[str, Any] = {"index": 0, "function": {"arguments": text}}
            if self._token_events == 1:
                call |= {"id": "call_0", "type": "function", "function": {"name": "answer", "arguments": text}}
            choice["delta"] = {"tool_calls": [call]}
            if choice["finish_reason"]:
                choice["finish_reason"] = "tool_calls"

    def _flush(self) -> Iterator[dict[str, Any]]:
        """The events held for a bundle, as one."""
        held, self._held = self._held, []
        if not held:
            return
        bundle, choices = held[-1], [event["choices"][0] for event in held]
        choice = bundle["choices"][0]
        if self._chat:
            choice["delta"] = {"content": "".join(each["delta"].get("content", "") for each in choices)}
        else:
            choice["text"] = "".join(each["text"] for each in choices)
        if "token_ids" in choice:
            choice["token_ids"] = [token for each in choices for token in each["token_ids"]]
        yield bundle

    def _release(self) -> list[bytes]:
        return [_render(event) for event in self._flush()]

    def _usage(self) -> dict[str, int]:
        prompt, made = self._truth.prompt_tokens, self._truth.made_tokens
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}

    # Ends before the end.

    def _cuts(self) -> bool:
        return any(
            fault is not None and self._token_events >= fault.value
            for fault in (self._truth.fault("cut"), self._truth.fault("error_event"))
        )

    async def _cut(self, out: list[bytes]) -> None:
        if self._truth.fault("cut"):
            await self._write(out)
            self._truth.ended = "cut"
            raise StopStreamError
        self._truth.ended = "error"
        failure = orjson.dumps(error_body("engine dead", kind="InternalServerError", code=500))
        await self._write(out)
        await self._write([b"event: error\ndata: " + failure], last=False)
        await self._write([b"data: [DONE]"], last=True)
        raise StopStreamError

    # Bytes.

    async def _write(self, events: list[bytes], last: bool = False) -> None:
        if self._truth.fault("crlf"):
            body = b"".join(b": keep-alive\r\n\r\n" + event.replace(b"\n", b"\r\n") + b"\r\n\r\n" for event in events)
        else:
            body = b"".join(event + b"\n\n" for event in events)
        if self._truth.fault("utf8_split"):
            inside = next((i for i in range(1, len(body)) if body[i] & 0xC0 == 0x80), None)
            if inside is not None:
                await self._send({"type": "http.response.body", "body": body[:inside], "more_body": True})
                await asyncio.sleep(0.002)
                body = body[inside:]
        if events:
            self._log_tokens()
        if body or last:
            await self._send({"type": "http.response.body", "body": body, "more_body": not last})

    def _log_tokens(self) -> None:
        """Tokens that the engine made and no earlier write carried go out now."""
        fresh = self._truth.made_tokens - self._truth.sent_tokens
        if fresh and not self._held:
            self._truth.sending(fresh)


def _choice(content: dict[str, Any]) -> dict[str, Any]:
    return {"index": 0, "finish_reason": None, **content}


def _render(event: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(event)
