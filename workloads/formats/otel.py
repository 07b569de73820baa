"""OpenTelemetry GenAI spans: a document with `spans` or `resourceSpans` (OTLP), an array of spans, or one span a line. Spans with
`gen_ai.*` attributes of a chat or completion are requests; other spans (tools, agents, HTTP) are counted apart. Messages are one
attribute (JSON text), or numbered ones as OpenLLMetry writes them (`gen_ai.prompt.0.content`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from workloads import rows
from workloads.rows import Batch, Drop, Row, batches
from workloads.source import TRUNCATED, Source

_CALLS = (None, "chat", "text_completion", "generate_content", "completion")
_OUTPUTS = ("gen_ai.output.text", "gen_ai.output.messages", "gen_ai.completion", "gen_ai.completion.0.content")
_MARKS = {
    *("gen_ai.request.model", "gen_ai.input.messages", "gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
    *("gen_ai.prompt", "gen_ai.prompt.0.content"),
}
_PARAMETERS = {
    "gen_ai.request.temperature": "temperature",
    "gen_ai.request.top_p": "top_p",
    "gen_ai.request.top_k": "top_k",
    "gen_ai.request.seed": "seed",
    "gen_ai.request.stop_sequences": "stop",
    "gen_ai.request.frequency_penalty": "frequency_penalty",
    "gen_ai.request.presence_penalty": "presence_penalty",
}


def matches(source: Source) -> bool:
    return any(
        isinstance(sample.get("spans"), list)
        or "resourceSpans" in sample
        or ("attributes" in sample and rows.first_of(sample, "span_id", "spanId") is not None)
        for sample in source.samples
    )


def read(source: Source) -> Iterator[Batch]:
    spans: list[tuple[int, Any]] = []
    for number, record in source.records():
        if record is TRUNCATED:
            spans.append((number, None))
        elif not isinstance(record, dict):
            raise source.error(number, "is no JSON object; correct or remove the line")
        else:
            found = list(_spans(record))
            spans += [(len(spans) + i if len(found) > 1 else number, span) for i, span in enumerate(found, 1)]
    calls = {_id(span): number for number, span in spans if isinstance(span, dict) and _is_call(_attributes(span))}
    return batches(_safely(number, span, calls) for number, span in spans)


def _spans(record: Mapping[str, Any]) -> Iterator[Any]:
    if isinstance(record.get("spans"), list):
        yield from record["spans"]
    elif isinstance(record.get("resourceSpans"), list):
        for resource in record["resourceSpans"]:
            scopes = resource.get("scopeSpans") if isinstance(resource, dict) else None
            for scope in scopes if isinstance(scopes, list) else ():
                yield from scope.get("spans") or () if isinstance(scope, dict) else ()
    else:
        yield record


def _safely(number: int, span: Any, calls: Mapping[Any, int]) -> Row | Drop:
    if span is None:
        return Drop("truncated_last_line")
    if not isinstance(span, dict):
        return Drop("bad_span")
    try:
        return {**_row(span, calls), "line": number}
    except Drop as drop:
        return drop


def _row(span: Mapping[str, Any], calls: Mapping[Any, int]) -> Row:
    attributes = _attributes(span)
    if not _is_call(attributes):
        raise Drop("not_a_generation")
    status = span.get("status")
    code = status.get("code") if isinstance(status, dict) else status
    if code in (2, "2", "ERROR", "STATUS_CODE_ERROR"):
        raise Drop("failed_upstream")
    parameters = {name: attributes[key] for key, name in _PARAMETERS.items() if attributes.get(key) is not None}
    parent = rows.first_of(span, "parent_span_id", "parentSpanId")
    row: Row = {
        "time": _time(rows.first_of(span, "start_time", "startTime", "startTimeUnixNano", "start_time_unix_nano")),
        "input_tokens": rows.input_count(rows.first_of(attributes, "gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")),
        "output_tokens": rows.output_count(
            rows.first_of(attributes, "gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
        ),
        "output_text": _text_of(rows.first_of(attributes, *_OUTPUTS)),
        "max_tokens": rows.limit_of(attributes.get("gen_ai.request.max_tokens")),
        "sampling": parameters or None,
        "session_id": rows.text(rows.first_of(attributes, "gen_ai.conversation.id", "session.id"))
        or rows.text(rows.first_of(span, "trace_id", "traceId")),
        "parent": calls.get(parent) if isinstance(parent, str | int) else None,
    }
    conversation = _parsed(rows.first_of(attributes, "gen_ai.input.messages", "gen_ai.prompt")) or _numbered(attributes)
    if isinstance(conversation, list) and conversation:
        row["messages"] = rows.messages([_message(message) for message in conversation])
    elif isinstance(conversation, str) and conversation:
        row["prompt"] = conversation
    elif row["input_tokens"] is None:
        raise Drop("no_prompt")
    return row


def _is_call(attributes: Mapping[str, Any]) -> bool:
    operation = attributes.get("gen_ai.operation.name")
    return any(name.startswith("gen_ai.") for name in attributes) and operation in _CALLS and not _MARKS.isdisjoint(attributes)


def _attributes(span: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes as a mapping; OTLP writes a list of {key, value: {stringValue: ...}}."""
    given = span.get("attributes")
    if isinstance(given, dict):
        return given
    found: dict[str, Any] = {}
    for item in given if isinstance(given, list) else ():
        if isinstance(item, dict) and isinstance(item.get("key"), str) and isinstance(item.get("value"), dict):
            found[item["key"]] = _value(item["value"])
    return found


def _value(typed: Mapping[str, Any]) -> Any:
    kind, value = next(iter(typed.items()), ("", None))
    if kind == "intValue" and isinstance(value, str) and value.isdecimal():
        return int(value)
    if kind == "arrayValue" and isinstance(value, dict) and isinstance(value.get("values"), list):
        return [_value(item) for item in value["values"] if isinstance(item, dict)]
    return value


def _numbered(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Messages given as `gen_ai.prompt.N.role` and `gen_ai.prompt.N.content`."""
    messages: list[dict[str, Any]] = []
    while (content := attributes.get(f"gen_ai.prompt.{len(messages)}.content")) is not None:
        messages.append({"role": attributes.get(f"gen_ai.prompt.{len(messages)}.role", "user"), "content": content})
    return messages


def _id(span: Mapping[str, Any]) -> Any:
    found = rows.first_of(span, "span_id", "spanId")
    return found if isinstance(found, str | int) else None


def _time(value: Any) -> Any:
    """OTLP writes nanoseconds as text."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _parsed(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
    return value


def _message(message: Any) -> Any:
    """The semantic conventions put content in `parts` of {type, content}."""
    if not isinstance(message, dict) or not isinstance(message.get("parts"), list):
        return message
    texts = [part["content"] for part in message["parts"] if isinstance(part, dict) and isinstance(part.get("content"), str)]
    return {"role": message.get("role"), "content": "".join(texts)}


def _text_of(value: Any) -> str | None:
    value = _parsed(value)
    if isinstance(value, list) and value:
        value = _message(value[0])
        value = value.get("content") if isinstance(value, dict) else value
    return rows.text(value)
