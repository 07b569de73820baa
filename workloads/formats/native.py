"""Native JSONL: one request a line.

Fields: `arrival_s` (seconds) or `timestamp`; one of `messages`, `prompt`, `token_ids`, `input_tokens`; optional `max_tokens`,
`output` (recorded text), `output_tokens`, `session_id`, `category`, `tenant`, `tools`, `response_format`, `prefix_blocks` with
`block_size`, `source_status`, sampling parameters by their API names (or in `sampling`), and `content_grade`, which can only
lower what the trace would be graded. A line that is the bare body of an API request is such a row too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from workloads import rows
from workloads.rows import Batch, Drop, Row, by_record
from workloads.source import Source

_PROMPTS = ("messages", "prompt", "token_ids", "input_tokens")


def matches(source: Source) -> bool:
    return any(name in sample for sample in source.samples for name in _PROMPTS)


def read(source: Source) -> Iterator[Batch]:
    grades = set()
    in_seconds = any("arrival_s" in sample for sample in source.samples)

    def row(record: Mapping[str, Any]) -> Row:
        grades.add(record.get("content_grade"))
        return native_row(record)

    for batch in by_record(row)(source):
        batch.grade = next((grade for grade in ("C", "B") if grade in grades), None)
        batch.unit = "s" if in_seconds else None
        yield batch


def native_row(record: Mapping[str, Any]) -> Row:
    row: Row = {
        "time": record["arrival_s"] if record.get("arrival_s") is not None else record.get("timestamp"),
        "input_tokens": rows.input_count(record.get("input_tokens")),
        "output_tokens": rows.output_count(record.get("output_tokens")),
        "output_text": rows.text(rows.first_of(record, "output", "output_text")),
        "session_id": rows.text(record.get("session_id")),
        "category": rows.text(record.get("category")),
        "tenant": rows.text(record.get("tenant")),
        "source_status": rows.text(record.get("source_status")),
        "parent": rows.count(record.get("parent"), "bad_parent"),
        "prefix_blocks": prefix_blocks(record.get("prefix_blocks")),
        "block_size": rows.count(record.get("block_size"), "bad_block_size", least=1),
    }
    if record.get("token_ids") is not None:
        row["token_ids"] = rows.token_list(record["token_ids"])
    if any(record.get(name) is not None for name in ("messages", "prompt")) or row["input_tokens"] is None:
        if row.get("token_ids") is None:
            row |= rows.request_body(record)
    else:
        row["max_tokens"] = rows.limit_of(record.get("max_tokens"))
        row["sampling"] = rows.sampling_of(record)
    row.setdefault("max_tokens", rows.limit_of(record.get("max_tokens")))
    given = record.get("sampling")
    if given is not None and not isinstance(given, dict):
        raise Drop("bad_sampling")
    row["sampling"] = {**(given or {}), **(rows.sampling_of(record) or {})} or None
    return row


def prefix_blocks(value: Any) -> list[int] | None:
    """Block ids, whole, up to 64 bits.

    Raises:
        Drop: not a list of whole numbers from 0.
    """
    if value is None:
        return None
    if not isinstance(value, list) or any(not isinstance(b, int) or isinstance(b, bool) or not 0 <= b < 2**64 for b in value):
        raise Drop("bad_prefix_blocks")
    return value
