"""Requests of a workload as bytes, and responses as records."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import orjson

from backends.types import ConfigError, Endpoint
from harness.stream import CountTokens, StreamReader, error_message
from harness.types import RequestRecord, Status
from harness.wire import Exchange, Origin, render
from workloads.types import Request, WorkloadError

KNOWS_TOKEN_IDS = frozenset({"reference", "simulated", "vllm"})
"""Servers that put the token ids of each chunk beside its text when asked (`return_token_ids`)."""

KNOWS_CONTINUOUS_USAGE = frozenset({"sglang", "tensorrt_llm"})
"""Servers that are asked for usage on every chunk instead (`stream_options.continuous_usage_stats`)."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How a load is sent and what is kept of it. The same options for every configuration that is compared."""

    max_output_tokens: int | None = None  # no request asks for more than this
    output_length: Literal["natural", "recorded"] = "natural"
    """natural: the model ends its answer itself, at most at the request's own limit, else at its recorded length. recorded:
    exactly the recorded length, with `ignore_eos`; text after the end of an answer repeats itself and flatters `ngram`."""
    seed: int | None = None  # sampled requests that bring no seed get one made of this and their index
    request_deadline_s: float = 300.0
    load_deadline_s: float | None = None  # what is not finished by then is cancelled
    prefix_cache: Literal["cold", "as_found"] = "cold"
    """cold: the server is asked to empty its prefix cache before the load; a server that cannot is named in a warning."""
    send_lag_limit_s: float = 0.005  # p99; or a tenth of the median TTFT, where that is more
    keep_outputs: bool = False  # text and token ids stay in the records
    lead_salt: str | None = None  # marks the prompts of lead-in and lead-out; None: a mark that no other load has
    count_tokens: CountTokens | None = None  # for servers that say neither usage nor token ids
    processes: int = 1  # client processes that share the load; see `harness.fanout`


@dataclass(frozen=True, slots=True)
class Call:
    """A request ready to be sent to one server."""

    request: Request
    path: str
    fields: Mapping[str, Any]  # the JSON body
    max_tokens: int | None

    def shortened(self, max_tokens: int) -> Call:
        limit = max(1, min(max_tokens, self.max_tokens or max_tokens))
        return replace(self, fields={**self.fields, "max_tokens": limit}, max_tokens=limit)


def call_of(request: Request, endpoint: Endpoint, options: ReplayOptions) -> Call:
    """The API call that replays `request`.

    Raises:
        WorkloadError: the request has no text.
    """
    fields: dict[str, Any] = {"model": endpoint.model, **request.sampling}
    if request.messages is not None:
        path = "/v1/chat/completions"
        fields["messages"] = request.messages
        if request.tools:
            fields["tools"] = request.tools
    elif request.prompt is not None or request.token_ids is not None:
        path = "/v1/completions"
        fields["prompt"] = request.prompt if request.prompt is not None else list(request.token_ids or ())
    else:
        where = f" (line {request.line})" if request.line else ""
        raise WorkloadError(f"request {request.index}{where} has lengths but no text: give it prompts with --prompts")
    if request.response_format:
        fields["response_format"] = request.response_format
    max_tokens = _limit(request, options)
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    if options.output_length == "recorded" and request.output_tokens:
        fields["ignore_eos"] = True
    if options.seed is not None and "seed" not in fields and fields.get("temperature") != 0:
        fields["seed"] = request_seed(options.seed, request.index)
    fields["stream"] = True
    stream_options: dict[str, Any] = {"include_usage": True}
    if endpoint.backend in KNOWS_CONTINUOUS_USAGE:
        stream_options["continuous_usage_stats"] = True
    fields["stream_options"] = stream_options
    if endpoint.backend in KNOWS_TOKEN_IDS:
        fields["return_token_ids"] = True
    if endpoint.backend == "simulated" and request.category:
        fields["metadata"] = {"category": request.category}
    return Call(request, path, fields, max_tokens)


def _limit(request: Request, options: ReplayOptions) -> int | None:
    if options.output_length == "recorded" and request.output_tokens:
        limit: int | None = request.output_tokens
    else:
        limit = request.max_tokens or request.output_tokens
    known = [value for value in (limit, options.max_output_tokens) if value]
    return min(known, default=None)


def request_seed(seed: int, index: int) -> int:
    """The same in every process and for every configuration (`hash` of a str is neither)."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=4).digest(), "big") >> 1


def unseen(request: Request, salt: str) -> Request:
    """A request of the same shape whose prompt shares no prefix with any other, so that it neither finds nor warms a cache."""
    if request.messages is not None:
        first, *others = request.messages
        content = first.get("content")
        marked: Any = f"[{salt}] {content or ''}"
        if isinstance(content, list):
            marked = [{"type": "text", "text": f"[{salt}] "}, *content]
        return replace(request, messages=[{**first, "content": marked}, *others])
    if request.prompt is not None:
        return replace(request, prompt=f"[{salt}] {request.prompt}")
    if request.token_ids:
        shift = 1 + request_seed(0, len(salt) + sum(salt.encode())) % len(request.token_ids)
        return replace(request, token_ids=[*request.token_ids[shift:], *request.token_ids[:shift]])
    return request


def headers(endpoint: Endpoint) -> tuple[tuple[str, str], ...]:
    """
    Raises:
        ConfigError: the variable that should hold the API key is not set.
    """
    if endpoint.api_key_env is None:
        return ()
    key = os.environ.get(endpoint.api_key_env)
    if not key:
        raise ConfigError(f"--api-key-env {endpoint.api_key_env}: this environment variable is not set")
    return (("Authorization", f"Bearer {key}"),)


def payload(call: Call, origin: Origin, common: tuple[tuple[str, str], ...], request_id: str) -> bytes:
    """The bytes of one request."""
    body = orjson.dumps(call.fields, default=_jsonable)
    return render("POST", call.path, origin, body, (*common, ("X-Request-Id", request_id)))


def _jsonable(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else list(value)


def record(
    request: Request, exchange: Exchange, reader: StreamReader, intended_s: float, start_s: float, options: ReplayOptions
) -> RequestRecord:
    """What happened to one request; clock times become seconds from `start_s`, the start of the load."""
    status, failure = outcome(exchange, reader)
    # What a failed request sent before it failed is no output: its arrivals are kept, its size is not.
    tokens, source = reader.output_tokens(options.count_tokens) if status == "completed" else (None, None)
    chunk_s = tuple([at - start_s for at in reader.chunk_s])
    return RequestRecord(
        index=request.index,
        status=status,
        failure=failure,
        intended_s=intended_s - start_s,
        sent_s=None if exchange.sent_s is None else exchange.sent_s - start_s,
        first_token_s=chunk_s[0] if chunk_s else None,
        last_token_s=chunk_s[-1] if chunk_s else None,
        input_tokens=reader.input_tokens,
        output_tokens=tokens,
        tokens_source=source,
        finish_reason=reader.finish_reason,
        chunk_s=chunk_s,
        chunk_tokens=reader.chunk_tokens(tokens),
        category=request.category,
        session=request.session_id,
        text=reader.text if options.keep_outputs else None,
        token_ids=tuple(reader.token_ids) if options.keep_outputs and reader.token_ids else None,
    )


def outcome(exchange: Exchange, reader: StreamReader) -> tuple[Status, str | None]:
    """How a request ended, and the kind of its failure.

    refused: the server answered 4xx. failed: connect, disconnect (before the response was complete), timeout, protocol,
    http_NNN, error_event, bad_json, truncated, not_streamed. A stream that said all it had to say is complete, whatever
    happened to its connection afterwards.
    """
    if exchange.status is not None and exchange.status != 200:
        return ("refused" if 400 <= exchange.status < 500 else "failed"), f"http_{exchange.status}"
    if reader.failure in ("error_event", "bad_json"):
        return "failed", reader.failure
    if reader.done:
        return "completed", None
    if exchange.failure == "cancelled":
        return "cancelled", "cancelled"
    failure = exchange.failure or reader.failure
    if failure == "disconnect" and exchange.status == 200:
        failure = "truncated"
    return ("failed", failure) if failure else ("completed", None)


def server_words(exchange: Exchange, reader: StreamReader) -> str | None:
    """What the server said about a failure."""
    if exchange.error_body.data:
        data = exchange.error_body.data
        try:
            return error_message(orjson.loads(data), data)
        except orjson.JSONDecodeError:
            return data[:200].decode(errors="replace")
    return reader.message
