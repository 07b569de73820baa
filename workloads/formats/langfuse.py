"""Langfuse exports: blob storage (snake_case, JSONL or CSV) and UI (camelCase). Rows of type GENERATION are requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from workloads import rows
from workloads.rows import Drop, Row, by_record
from workloads.source import Source
from workloads.times import iso_ns

_INPUT = ("prompt_tokens", "promptTokens", "inputUsage")
_OUTPUT = ("completion_tokens", "completionTokens", "outputUsage")
"""Names in `usage`, and of older exports' columns, which are 0 where nothing is known."""
_TYPES = ("GENERATION", "SPAN", "EVENT", "TRACE")


def matches(source: Source) -> bool:
    if source.kind == "csv":
        return {"type", "starttime", "input"} <= set(source.header) and "traceid" in source.header
    return any(
        str(sample.get("type")).upper() in _TYPES and rows.first_of(sample, "startTime", "start_time")
        for sample in source.samples
    )


def row(record: Mapping[str, Any]) -> Row:
    if str(record.get("type")).upper() != "GENERATION":
        raise Drop("not_a_generation")
    if str(record.get("level")).upper() == "ERROR":
        raise Drop("failed_upstream")
    usage = _parsed(rows.first_of(record, "usageDetails", "usage_details", "usage"))
    usage = usage if isinstance(usage, dict) else {}
    parameters = _parsed(rows.first_of(record, "modelParameters", "model_parameters"))
    parameters = parameters if isinstance(parameters, dict) else {}
    start, end = (rows.first_of(record, *names) for names in (("startTime", "start_time"), ("endTime", "end_time")))
    found: Row = {
        "time": start,
        "input_tokens": rows.input_count(
            rows.first_of(usage, "input", *_INPUT) if usage else rows.first_of(record, *_INPUT) or None
        ),
        "output_tokens": rows.output_count(
            rows.first_of(usage, "output", *_OUTPUT) if usage else rows.first_of(record, *_OUTPUT) or None
        ),
        "output_text": _answer(_parsed(record.get("output"))),
        "session_id": rows.text(rows.first_of(record, "sessionId", "session_id", "traceId", "trace_id")),
        "tenant": rows.text(rows.first_of(record, "userId", "user_id")),
        "source_latency_s": _seconds_between(start, end),
        "sampling": rows.sampling_of(parameters),
        "max_tokens": rows.limit_of(rows.first_of(parameters, "max_completion_tokens", "max_tokens")),
    }
    asked = _parsed(record.get("input"))
    if isinstance(asked, list):
        asked = {"messages": asked}
    elif isinstance(asked, str) and asked:
        asked = {"prompt": asked}
    if isinstance(asked, dict) and ("messages" in asked or "prompt" in asked):
        found |= {k: v for k, v in rows.request_body({**parameters, **asked}).items() if v is not None}
    elif found["input_tokens"] is None:
        raise Drop("no_prompt")
    return found


def _parsed(value: Any) -> Any:
    """CSV and some exports hold JSON as text."""
    if isinstance(value, str) and value[:1] in ("{", "[", '"'):
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
    return value


def _answer(output: Any) -> str | None:
    if isinstance(output, list) and len(output) == 1:
        output = output[0]
    if isinstance(output, dict):
        output = rows.first_of(output, "content", "completion", "text")
    return rows.text(output)


def _seconds_between(start: Any, end: Any) -> float | None:
    first, last = iso_ns(str(start)), iso_ns(str(end))
    return (last - first) / 1e9 if first is not None and last is not None and last >= first else None


read = by_record(row)
