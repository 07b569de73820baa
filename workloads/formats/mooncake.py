"""Mooncake traces (github.com/kvcache-ai/Mooncake, FAST'25): `timestamp` (ms), `input_length`, `output_length`, `hash_ids` of
blocks of 512 tokens. Also the extended form that replay tools use: one of `input_length`, `text_input`, `messages`, `payload`;
`delay` (ms after the previous turn) in place of `timestamp`; `session_id`, `tools`; blocks of another size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from workloads import rows
from workloads.formats.native import prefix_blocks
from workloads.rows import BATCH_ROWS, Batch, Drop, Row, batches
from workloads.source import TRUNCATED, Source

BLOCK_TOKENS = (512, 16, 64, 32, 128, 256, 1024)
"""Block sizes that are tried, the traces' own first."""

_SHAPE = ("timestamp", "input_length", "output_length", "hash_ids")
_EXTENDED = ("text_input", "messages", "payload")


def matches(source: Source) -> bool:
    return any(_is_row(sample) for sample in source.samples)


def _is_row(sample: Mapping[str, Any]) -> bool:
    if any(isinstance(sample.get(name), dict) for name in ("hash_ids",)) or "chat_id" in sample:
        return False
    marks = {"output_length", "hash_ids", "delay", "text_input", "payload"} & sample.keys()
    return "input_length" in sample or bool(marks and any(name in sample for name in _EXTENDED))


def read(source: Source) -> Iterator[Batch]:
    block_size: int | None = None
    begun: set[str | None] = set()  # sessions whose rows hold new messages only
    for numbers, records in _chunks(source):
        if block_size is None:
            block_size = _block_size(records)
        batch = _plain(numbers, records, block_size)
        if batch is None:
            found = _one_by_one(source, numbers, records, block_size, begun)
            (batch,) = [b for b in batches(found) if b.read] or [Batch()]
        if block_size != BLOCK_TOKENS[0]:
            batch.notes = (*batch.notes, f"prefix blocks taken as {block_size} tokens: that size covers the inputs")
        yield batch


def _chunks(source: Source) -> Iterator[tuple[list[int], list[Any]]]:
    """Records with their numbers, fewer than a batch at a time."""
    numbers: list[int] = []
    records: list[Any] = []
    for number, record in source.records():
        numbers.append(number)
        records.append(record)
        if len(records) == BATCH_ROWS // 2:
            yield numbers, records
            numbers, records = [], []
    if records:
        yield numbers, records


def _block_size(records: list[Any]) -> int:
    """The size under which nearly every row's blocks cover its input exactly; the usual one where none does."""
    shapes = [
        (record["input_length"], len(record["hash_ids"]))
        for record in records[:1000]
        if isinstance(record, dict)
        and isinstance(record.get("input_length"), int)
        and isinstance(record.get("hash_ids"), list)
        and record["hash_ids"]
    ]
    for size in BLOCK_TOKENS:
        if sum(-(-tokens // size) == blocks for tokens, blocks in shapes) >= 0.9 * len(shapes):
            return size
    return BLOCK_TOKENS[0]


def _plain(numbers: list[int], records: list[Any], block_size: int) -> Batch | None:
    """Rows of exactly the four fields, all sound, at once; None where any is not, so that they have to be looked at one by one."""
    try:
        if sum(map(len, records)) != len(_SHAPE) * len(records):
            return None
        times, inputs, outputs = (pa.array([r[name] for r in records]) for name in _SHAPE[:3])
        blocks = pa.array([r["hash_ids"] for r in records], pa.large_list(pa.uint64()))
    except (KeyError, TypeError, ValueError, OverflowError, pa.ArrowException):
        return None
    whole = all(pa.types.is_integer(column.type) and not column.null_count for column in (inputs, outputs))
    if not whole or blocks.null_count or not (pa.types.is_integer(times.type) or pa.types.is_floating(times.type)):
        return None
    covered = -(-inputs.to_numpy() // block_size) == np.diff(blocks.offsets.to_numpy())
    if not covered.all() or inputs.to_numpy().min() < 1 or outputs.to_numpy().min() < 1 or times.null_count:
        return None
    if not _integers_only(records):
        return None
    columns = {
        "time": times,
        "input_tokens": inputs,
        "output_tokens": outputs,
        "prefix_blocks": blocks,
        "block_size": pa.array(np.full(len(records), block_size)),
        "line": pa.array(numbers, pa.int64()),
    }
    return Batch(columns, read=len(records))


def _integers_only(records: list[Any]) -> bool:
    """Arrow takes 1.0 and true for the id 1; nobody else should."""
    return all(set(map(type, record["hash_ids"])) <= {int} for record in records)


def _one_by_one(
    source: Source, numbers: list[int], records: list[Any], block_size: int, begun: set[str | None]
) -> Iterator[Row | Drop]:
    for number, record in zip(numbers, records, strict=True):
        if record is TRUNCATED:
            yield Drop("truncated_last_line")
        elif not isinstance(record, dict):
            raise source.error(number, "is no JSON object; correct or remove the line")
        else:
            try:
                row = _row(record, block_size)
                if record.get("message_mode") == "delta":
                    if row["session_id"] in begun:  # its prompt holds a reply that the server is yet to give
                        raise Drop("turn_needs_a_live_reply")
                    begun.add(row["session_id"])
                yield {**row, "line": number}
            except Drop as drop:
                yield drop


def _row(record: Mapping[str, Any], block_size: int) -> Row:
    row: Row = {
        "time": record.get("timestamp"),
        "input_tokens": rows.input_count(record.get("input_length")),
        "output_tokens": rows.output_count(record.get("output_length")),
        "session_id": rows.text(record.get("session_id")),
        "delay_s": _delay_s(record.get("delay")),
        "tools": record.get("tools") if isinstance(record.get("tools"), list) and record["tools"] else None,
    }
    blocks = prefix_blocks(record.get("hash_ids"))
    if blocks:
        if row["input_tokens"] is not None and -(-row["input_tokens"] // block_size) != len(blocks):
            raise Drop("blocks_do_not_cover_input")
        row |= {"prefix_blocks": blocks, "block_size": block_size}
    extra = record.get("extra") if isinstance(record.get("extra"), dict) else {}
    row["sampling"] = rows.sampling_of(extra or {})
    if isinstance(record.get("payload"), dict):
        body = rows.request_body(record["payload"])
        row |= {name: value for name, value in body.items() if value is not None}
    elif record.get("messages") is not None:
        row["messages"] = rows.messages(record["messages"])
    elif rows.text(record.get("text_input")):
        row["prompt"] = record["text_input"]
    elif row["input_tokens"] is None:
        raise Drop("no_prompt")
    return row


def _delay_s(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise Drop("bad_delay")
    return value / 1000
