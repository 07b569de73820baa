"""The OpenAI-compatible HTTP server that the reference and the simulated engine share.

`POST /v1/completions`, `/v1/chat/completions` (streamed and not), `/tokenize`; `GET /v1/models`, `/health`, `/version`,
`/metrics`. The stream has vLLM's shape: the chat role in front of the first token, one chunk for what one engine step
emitted, `finish_reason` on the last chunk with tokens, then usage with `choices: []` where asked for, then ``[DONE]``. Status
and headers go out with the first token, so a request that fails before it gets a real status code; a failure after it is an
``{"error": ...}`` event inside HTTP 200, as engines send it.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from importlib import metadata
from typing import Any, Literal

import orjson
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from backends.openai_requests import (
    ChatRequest,
    CompletionRequest,
    Sampling,
    TokenizeRequest,
    chat_ids,
    generation_request,
    prompt_ids,
)
from backends.serving import GenerationRequest, RequestError, ServedEngine, TokenChunk, TokenLogprob

DONE = b"data: [DONE]\n\n"


def error_body(message: str, *, kind: str = "BadRequestError", field: str | None = None, code: int = 400) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def error_response(message: str, *, kind: str = "BadRequestError", field: str | None = None, code: int = 400) -> JSONResponse:
    return JSONResponse(error_body(message, kind=kind, field=field, code=code), status_code=code)


class Rendering:
    """Turns the chunks of one request into the JSON of its endpoint."""

    def __init__(self, body: Sampling, request: GenerationRequest, decode: Callable[[Sequence[int]], str]) -> None:
        self.decode = decode
        self.chat = isinstance(body, ChatRequest)
        self.body = body
        self.prompt_ids = request.prompt_ids
        self.completion_tokens = 0
        prefix = "chatcmpl" if self.chat else "cmpl"
        self.head = {
            "id": f"{prefix}-{request.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
        }
        if self.chat:
            self.head["object"] = "chat.completion.chunk" if body.stream else "chat.completion"

    def usage(self) -> dict[str, int]:
        prompt, completion = len(self.prompt_ids), self.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def opening(self) -> bytes:
        """What precedes the first token: the role, for chat."""
        if not self.chat:
            return b""
        event: dict[str, Any] = {
            **self.head,
            "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
        }
        if self.body.return_token_ids:
            event["prompt_token_ids"] = self.prompt_ids
        return _event(event)

    def chunk(self, chunk: TokenChunk) -> bytes:
        """One event; counts its tokens."""
        first = self.completion_tokens == 0
        self.completion_tokens += len(chunk.token_ids)
        choice: dict[str, Any] = {"index": 0, "finish_reason": chunk.finish_reason, "logprobs": self.logprobs([chunk])}
        if self.chat:
            choice["delta"] = {"content": chunk.text}
        else:
            choice["text"] = chunk.text
        if self.body.return_token_ids:
            choice["token_ids"] = chunk.token_ids
            if first and not self.chat:
                choice["prompt_token_ids"] = self.prompt_ids
        event = {**self.head, "choices": [choice]}
        if self.body.wants_usage_on_every_chunk:
            event["usage"] = self.usage()
        return _event(event)

    def logprobs(self, chunks: Sequence[TokenChunk]) -> dict[str, Any] | None:
        """Log-probabilities of the chunks' tokens in the layout of the endpoint; None where they were not asked for."""
        told = [(token, entry) for chunk in chunks for token, entry in zip(chunk.token_ids, chunk.logprobs, strict=False)]
        if not told:
            return None

        def named(token: int, logprob: float) -> dict[str, Any]:
            return {"token": self.decode([token]), "logprob": logprob}

        if self.chat:
            content = [{**named(token, e.logprob), "top_logprobs": [named(*top) for top in e.top]} for token, e in told]
            return {"content": content}
        return {
            "tokens": [self.decode([token]) for token, _ in told],
            "token_logprobs": [entry.logprob for _, entry in told],
            # Two tokens may read alike, which one mapping cannot hold: then the less likely one carries its id too.
            "top_logprobs": [_by_text(entry, self.decode) for _, entry in told],
        }

    def closing(self) -> bytes:
        if not self.body.wants_usage:
            return DONE
        return _event({**self.head, "choices": [], "usage": self.usage()}) + DONE

    def whole(self, chunks: list[TokenChunk]) -> bytes:
        """The body of a request that is not streamed."""
        self.completion_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        text = "".join(chunk.text for chunk in chunks)
        finish_reason = chunks[-1].finish_reason if chunks else None
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": self.logprobs(chunks)}
        response: dict[str, Any] = {**self.head, "choices": [choice], "usage": self.usage()}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        if self.body.return_token_ids:
            choice["token_ids"] = [token for chunk in chunks for token in chunk.token_ids]
            (response if self.chat else choice)["prompt_token_ids"] = self.prompt_ids
        return orjson.dumps(response)


def _by_text(entry: TokenLogprob, decode: Callable[[Sequence[int]], str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for token, logprob in entry.top:
        text = decode([token])
        found[f"{text} ({token})" if text in found else text] = logprob
    return found


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


class GenerationResponse(Response):
    """Sends one generation, streamed or whole, and cancels it when the client goes away."""

    def __init__(self, engine: ServedEngine, request: GenerationRequest, rendering: Rendering) -> None:
        super().__init__()
        self.engine, self.request, self.rendering = engine, request, rendering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        produce = self._stream if self.rendering.body.stream else self._whole
        work = asyncio.ensure_future(produce(scope, receive, send))
        gone = asyncio.ensure_future(_disconnection(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            results = await asyncio.gather(work, gone, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with aclosing(_generator(self.engine, self.request)) as chunks:
                async for chunk in chunks:
                    body = self.rendering.chunk(chunk)
                    if not started:
                        started = True
                        await send(_start(b"text/event-stream; charset=utf-8"))
                        body = self.rendering.opening() + body
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            if not started:  # the engine ended without a token
                await send(_start(b"text/event-stream; charset=utf-8"))
                await send({"type": "http.response.body", "body": self.rendering.opening(), "more_body": True})
            end = self.rendering.closing()
        except Exception as failure:
            if not started:
                await _failure(failure)(scope, receive, send)
                return
            end = _event(error_body(str(failure), kind="InternalServerError", code=500)) + DONE
        await send({"type": "http.response.body", "body": end})

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(_generator(self.engine, self.request)) as chunks:
                collected = [chunk async for chunk in chunks]
        except Exception as failure:
            await _failure(failure)(scope, receive, send)
            return
        await Response(self.rendering.whole(collected), media_type="application/json")(scope, receive, send)


async def _generator(engine: ServedEngine, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
    """The engine's chunks as an async generator, whose closing cancels the request."""
    chunks = engine.generate(request)
    try:
        async for chunk in chunks:
            yield chunk
    finally:
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await close()


def _failure(failure: Exception) -> JSONResponse:
    if isinstance(failure, RequestError):
        return error_response(str(failure), field=failure.field)
    return error_response(str(failure) or type(failure).__name__, kind="InternalServerError", code=500)


def _start(content_type: bytes) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type)]}


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def create_app(engine: ServedEngine) -> FastAPI:
    """The application that serves `engine`. At shutdown it drains the engine."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.drain()

    app = FastAPI(title="spectune", lifespan=lifespan, openapi_url=None)

    @app.exception_handler(RequestValidationError)
    async def invalid_body(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return error_response(f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
        path = [str(part) for part in first["loc"][1:]]
        return error_response(f"{'.'.join(path) or 'body'}: {first['msg']}", field=path[0] if path else None)

    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> JSONResponse:
        if error.field == "model":
            return error_response(str(error), kind="NotFoundError", field="model", code=404)
        return error_response(str(error), field=error.field)

    def respond(http: Request, body: CompletionRequest | ChatRequest) -> Response:
        if not engine.ready:
            return error_response("the engine is not ready", kind="ServiceUnavailableError", code=503)
        request_id = http.headers.get("x-request-id") or uuid.uuid4().hex
        request = generation_request(engine, body, request_id=request_id)
        return GenerationResponse(engine, request, Rendering(body, request, engine.decode))

    @app.post("/v1/completions")
    async def completions(http: Request, body: CompletionRequest) -> Response:
        return respond(http, body)

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request, body: ChatRequest) -> Response:
        return respond(http, body)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give exactly one of prompt and messages", field="prompt")
        ids = prompt_ids(engine, body.prompt) if body.prompt is not None else chat_ids(engine, body)
        return JSONResponse({"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids})

    @app.get("/v1/models")
    async def models() -> Response:
        card = {"id": engine.model, "object": "model", "owned_by": "spectune", "max_model_len": engine.max_model_len}
        return JSONResponse({"object": "list", "data": [card]})

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if engine.ready else 503)

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": _version()})

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(engine.metrics_page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def _version() -> str | None:
    try:
        return metadata.version("spectune")
    except metadata.PackageNotFoundError:  # a checkout that was not installed
        return None


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Prints one line and exits with 2 where the port cannot be had."""
    # The protocol is named because asyncio switches Nagle's delay off (40 ms a response) only on sockets that name it.
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        print(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port", file=sys.stderr)
        raise SystemExit(2) from None
    return sock


def run(engine: ServedEngine, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serve until SIGTERM or SIGINT, then finish what runs and return.

    Raises:
        SystemExit: 2, after one line on stderr, where the port cannot be had.
    """
    serve(create_app(engine), listen(host, port))


def serve(app: Any, sock: socket.socket, loop: Literal["uvloop", "asyncio"] = "uvloop") -> None:
    """Run an ASGI application on a bound socket until SIGTERM or SIGINT."""
    config = uvicorn.Config(app, loop=loop, http="httptools", access_log=False, log_level="warning", lifespan="on")
    server = uvicorn.Server(config)
    # uvicorn raises the signal again after its clean shutdown; with the default handler that would be exit code -15.
    previous = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run(sockets=[sock])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
