"""RAGPulse (github.com/flashserve/RAGPulse): `timestamp` (s, as text), `input_length`, `output_length`, `session_id`, and
`hash_ids`, an object of lists in prompt order. Its ids name pieces of various lengths, so they show what is shared and cover no
fixed number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workloads import rows
from workloads.formats.native import prefix_blocks
from workloads.rows import Drop, Row, by_record
from workloads.source import Source

_PARTS = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")


def matches(source: Source) -> bool:
    return any(isinstance(sample.get("hash_ids"), dict) and "input_length" in sample for sample in source.samples)


def row(record: Mapping[str, Any]) -> Row:
    parts = record.get("hash_ids")
    if parts is not None and not isinstance(parts, dict):
        raise Drop("bad_prefix_blocks")
    blocks = [block for name in _PARTS for block in prefix_blocks((parts or {}).get(name)) or ()]
    found: Row = {
        "time": record.get("timestamp"),
        "input_tokens": rows.input_count(record.get("input_length")),
        "output_tokens": rows.output_count(record.get("output_length")),
        "session_id": rows.text(record.get("session_id")),
        "prefix_blocks": blocks or None,
    }
    if found["input_tokens"] is None:
        raise Drop("bad_input_tokens")
    return found


read = by_record(row)
