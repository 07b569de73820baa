"""Bailian (Alibaba Qwen usage traces): `chat_id`, `parent_chat_id` (-1 at the root), `timestamp` (s), `input_length`,
`output_length`, `type`, `turn`, and `hash_ids` of blocks of 16 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from workloads import rows
from workloads.formats.native import prefix_blocks
from workloads.rows import Batch, Drop, Row, batches
from workloads.source import TRUNCATED, Source

BLOCK_TOKENS = 16


def matches(source: Source) -> bool:
    return any({"chat_id", "parent_chat_id", "input_length"} <= sample.keys() for sample in source.samples)


def read(source: Source) -> Iterator[Batch]:
    return batches(_rows(source))


def _rows(source: Source) -> Iterator[Row | Drop]:
    chats: dict[str, tuple[int, str]] = {}  # chat id -> (its line, the conversation's first chat)
    for number, record in source.records():
        if record is TRUNCATED:
            yield Drop("truncated_last_line")
            continue
        if not isinstance(record, dict):
            raise source.error(number, "is no JSON object; correct or remove the line")
        chat, parent = str(record.get("chat_id")), str(record.get("parent_chat_id"))
        line, root = chats.get(parent, (None, chat))
        try:
            row = _row(record)
        except Drop as drop:
            yield drop
            continue
        chats[chat] = (number, root)
        yield {**row, "session_id": root, "parent": line, "line": number}


def _row(record: Mapping[str, Any]) -> Row:
    row: Row = {
        "time": record.get("timestamp"),
        "input_tokens": rows.input_count(record.get("input_length")),
        "output_tokens": rows.output_count(record.get("output_length")),
        "category": rows.text(record.get("type")),
    }
    if row["input_tokens"] is None:
        raise Drop("bad_input_tokens")
    blocks = prefix_blocks(record.get("hash_ids"))
    if blocks:
        if -(-row["input_tokens"] // BLOCK_TOKENS) != len(blocks):
            raise Drop("blocks_do_not_cover_input")
        row |= {"prefix_blocks": blocks, "block_size": BLOCK_TOKENS}
    return row
