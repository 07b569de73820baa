"""LiteLLM StandardLoggingPayload rows. Failures and cache hits are counted apart: neither was generated. Text may be redacted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workloads import rows
from workloads.formats.openai_batch import completion
from workloads.rows import Drop, Row, by_record
from workloads.source import Source

_REDACTED = "redacted-by-litellm"
_CALLS = ("completion", "acompletion", "text_completion", "atext_completion", "responses", "aresponses")


def matches(source: Source) -> bool:
    return any({"startTime", "call_type"} <= sample.keys() for sample in source.samples)


def row(record: Mapping[str, Any]) -> Row:
    if record.get("call_type") not in _CALLS:
        raise Drop("not_a_generation")
    if record.get("status") not in (None, "success"):
        raise Drop("failed_upstream")
    if record.get("cache_hit") in (True, "True", "true"):
        raise Drop("cache_hit")
    parameters = record.get("model_parameters") if isinstance(record.get("model_parameters"), dict) else {}
    answer = record.get("response") if isinstance(record.get("response"), dict) else {}
    found: Row = {
        **completion(answer or {}),
        "time": record.get("startTime"),
        "input_tokens": rows.input_count(record.get("prompt_tokens")),
        "output_tokens": rows.output_count(record.get("completion_tokens")),
        "session_id": rows.text(record.get("session_id")),
        "tenant": rows.text(rows.first_of(record, "end_user", "model_group")),
        "source_latency_s": _latency_s(record),
    }
    prompt = record.get("messages")
    if isinstance(prompt, str) and prompt and _REDACTED not in prompt:
        body: Mapping[str, Any] = {"prompt": prompt, **(parameters or {})}
        found |= {k: v for k, v in rows.request_body(body).items() if v is not None}
    elif isinstance(prompt, list) and _REDACTED not in str(prompt):
        body = {**(parameters or {}), "messages": prompt}
        found |= {k: v for k, v in rows.request_body(body).items() if v is not None}
    else:
        if found["input_tokens"] is None:
            raise Drop("redacted")
        found["sampling"] = rows.sampling_of(parameters or {})
        found["max_tokens"] = rows.limit_of(rows.first_of(parameters or {}, "max_completion_tokens", "max_tokens"))
    if _REDACTED in str(found.get("output_text")):
        found["output_text"] = None
    return found


def _latency_s(record: Mapping[str, Any]) -> float | None:
    start, end = record.get("startTime"), record.get("endTime")
    if isinstance(start, int | float) and isinstance(end, int | float) and end >= start:
        return float(end - start)
    return None


read = by_record(row)
