"""Bodies that the OpenAI-compatible server accepts, and what it does with each parameter.

Three kinds of parameter exist: those below, which act; `NEUTRAL` ones, which this server does not implement and accepts only at
the value that changes nothing; and `WITHOUT_EFFECT` ones, which are bookkeeping of the caller. Anything else is refused by
name, because a parameter that is silently dropped makes a measurement of something the user did not ask for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from backends.serving import GenerationRequest, RequestError, ServedEngine

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "prompt_logprobs": (None,),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "length_penalty": (None, 1),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "stop_token_ids": (None, []),
    "use_beam_search": (None, False),
    "skip_special_tokens": (None, True),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
}
WITHOUT_EFFECT = frozenset({"user", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"})

TokenIds = list[Annotated[int, Field(ge=0)]]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    continuous_usage_stats: bool = False  # usage on every chunk; needs include_usage, as in vLLM


class Sampling(BaseModel):
    """What completions and chat completions have in common. Defaults are OpenAI's."""

    model_config = ConfigDict(extra="allow")
    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)  # 0 and -1 are off
    seed: int | None = Field(default=None, ge=0)
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    metadata: dict[str, str] | None = None  # `category` is handed to the engine

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_usage_on_every_chunk(self) -> bool:
        return self.stream_options is not None and self.wants_usage and self.stream_options.continuous_usage_stats


class CompletionRequest(Sampling):
    prompt: str | TokenIds | list[str] | list[TokenIds]
    logprobs: int | None = Field(default=None, ge=0)  # alternatives for each token

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")  # name, tool_calls, tool_call_id: the chat template decides
    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(Sampling):
    """`tools` are rendered by the chat template; calls come back as text, since no tool parser runs here."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)  # alternatives for each token

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None


def refuse_unsupported(body: Sampling) -> None:
    """Raises RequestError, naming the field, for a parameter that would change the output and is not implemented."""
    for name, value in (body.model_extra or {}).items():
        if name in NEUTRAL:
            if value not in NEUTRAL[name]:
                raise RequestError(f"{name}={value!r} is not supported by this server; leave it out", field=name)
        elif name not in WITHOUT_EFFECT:
            raise RequestError(f"unknown parameter '{name}'", field=name)


def prompt_ids(engine: ServedEngine, prompt: str | Sequence[Any]) -> list[int]:
    """Token ids of the `prompt` field: a text, token ids, or a list that holds one of either."""
    if isinstance(prompt, str):
        return engine.encode(prompt)
    if prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise RequestError(f"prompt holds {len(prompt)} prompts: send one request for each", field="prompt")
        return prompt_ids(engine, prompt[0])
    return list(prompt)


def chat_ids(engine: ServedEngine, body: ChatRequest | TokenizeRequest) -> list[int]:
    """Token ids of `messages` under the model's chat template."""
    tools = body.tools if isinstance(body, ChatRequest) else None
    messages = [
        {**message.model_dump(exclude_none=True), "content": _text_of(message.content, f"messages[{i}].content")}
        for i, message in enumerate(body.messages or ())
    ]
    return engine.encode_chat(messages, tools)


def _text_of(content: str | list[dict[str, Any]] | None, where: str) -> str:
    if not isinstance(content, list):
        return content or ""
    for j, part in enumerate(content):
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"{where}[{j}] has type {part.get('type')!r}: only text parts are supported", field="messages")
    return "".join(part["text"] for part in content)


def generation_request(engine: ServedEngine, body: CompletionRequest | ChatRequest, *, request_id: str) -> GenerationRequest:
    """The request as the engine sees it.

    Raises:
        RequestError: a field holds what this engine cannot do; the message and `field` name it.
    """
    if body.model != engine.model:
        raise RequestError(f"the model '{body.model}' does not exist; this server has '{engine.model}'", field="model")
    refuse_unsupported(body)
    if body.alternatives is not None and (not engine.max_logprobs or body.alternatives > engine.max_logprobs):
        reason = f"at most {engine.max_logprobs}" if engine.max_logprobs else "not supported by this server; leave it out"
        raise RequestError(f"logprobs={body.alternatives}: {reason}", field="logprobs")
    if isinstance(body, ChatRequest):
        ids, where = chat_ids(engine, body), "messages"
    else:
        ids, where = prompt_ids(engine, body.prompt), "prompt"
    room = engine.max_model_len - len(ids)
    if not ids:
        raise RequestError(f"{where} is empty", field=where)
    if room < 1:
        raise RequestError(f"{where} has {len(ids)} tokens; the context holds {engine.max_model_len}", field=where)
    limit, limit_field = body.max_tokens, "max_tokens"
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        limit, limit_field = body.max_completion_tokens, "max_completion_tokens"
    if limit is not None and limit > room:
        raise RequestError(
            f"{limit_field}={limit} and {len(ids)} prompt tokens exceed the context of {engine.max_model_len}",
            field=limit_field,
        )
    if limit is None:
        limit = room if isinstance(body, ChatRequest) else min(16, room)
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if "" in stop:
        raise RequestError("stop holds an empty string", field="stop")
    return GenerationRequest(
        prompt_ids=tuple(ids),
        max_tokens=limit,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        seed=body.seed,
        stop=stop,
        ignore_eos=body.ignore_eos,
        logprobs=body.alternatives,
        request_id=request_id,
        category=(body.metadata or {}).get("category"),
    )
