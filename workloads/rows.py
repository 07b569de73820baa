"""Between the formats and the loader: batches of rows by column, and the checks that every format's rows go through."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import pyarrow as pa

from workloads.source import TRUNCATED, Source
from workloads.times import number_in
from workloads.types import JSON_COLUMNS, SCHEMA

BATCH_ROWS = 16_384

Row = dict[str, Any]
"""A row as a format hands it over: names of `SCHEMA` (without `arrival_s`), and `time` as the source has it."""

SAMPLING_KEYS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("n", "best_of", "logprobs", "top_logprobs", "logit_bias", "min_tokens", "ignore_eos", "bad_words", "stop_token_ids"),
    *("tool_choice", "reasoning_effort", "chat_template_kwargs"),
)
"""Parameters of a request that are kept, as the API names them."""


class Drop(Exception):
    """A row that cannot be used; the argument is the reason under which it is counted."""


@dataclass
class Batch:
    """Kept rows by column: `time` raw, the rest as in `SCHEMA`; and the account of what was read for them."""

    columns: dict[str, Any] = field(default_factory=dict)
    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    notes: tuple[str, ...] = ()
    unit: str | None = None  # of the times, where the rows themselves say it
    grade: str | None = None  # content grade that the source declares

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0


def by_record(row: Callable[[Mapping[str, Any]], Row]) -> Callable[[Source], Iterator[Batch]]:
    """A reader for formats in which each record is one request: `row` turns it into a `Row` or raises `Drop`."""

    def read(source: Source) -> Iterator[Batch]:
        def rows() -> Iterator[Row | Drop]:
            for number, record in source.records():
                if record is TRUNCATED:
                    yield Drop("truncated_last_line")
                elif not isinstance(record, dict):
                    raise source.error(number, "is no JSON object; correct or remove the line")
                else:
                    try:
                        yield {**row(record), "line": number}
                    except Drop as drop:
                        yield drop

        return batches(rows())

    return read


def batches(rows: Iterator[Row | Drop]) -> Iterator[Batch]:
    """Rows and drops, put together by column."""
    kept: list[Row] = []
    batch = Batch()
    for row in rows:
        batch.read += 1
        if isinstance(row, Drop):
            batch.dropped[str(row)] += 1
        else:
            kept.append(row)
        if batch.read >= BATCH_ROWS:
            batch.columns = _columns(kept)
            yield batch
            kept, batch = [], Batch()
    batch.columns = _columns(kept)
    yield batch


def _columns(rows: list[Row]) -> dict[str, Any]:
    names = {name for row in rows for name, value in row.items() if value is not None}
    columns: dict[str, Any] = {"time": [row.get("time") for row in rows]} if rows else {}
    for name in SCHEMA.names:
        if name in names:
            values = [row.get(name) for row in rows]
            if name in JSON_COLUMNS:
                values = [None if v is None else orjson.dumps(v, default=str).decode() for v in values]
            columns[name] = pa.array(values, SCHEMA.field(name).type)
    return columns


def count(value: Any, reason: str, *, least: int = 0) -> int | None:
    """A count of tokens; None stays None.

    Raises:
        Drop: negative, no whole number, NaN, or no number.
    """
    if value is None or value == "":
        return None
    if isinstance(value, str):
        value = number_in(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Drop(reason)
    if isinstance(value, float) and (not math.isfinite(value) or value != int(value)):
        raise Drop(reason)
    if not least <= value < 2**40:
        raise Drop(reason)
    return int(value)


def input_count(value: Any) -> int | None:
    return count(value, "bad_input_tokens", least=1)


def output_count(value: Any) -> int | None:
    """Raises `Drop`: a request that got no token failed at its source."""
    found = count(value, "bad_output_tokens")
    if found == 0:
        raise Drop("failed_upstream")
    return found


def limit_of(value: Any) -> int | None:
    return count(value, "bad_max_tokens", least=1)


def text(value: Any) -> str | None:
    """Text or a number as text (ids); None for anything else."""
    if isinstance(value, str):
        return value or None
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None


def messages(value: Any) -> list[dict[str, Any]]:
    """A conversation in the API's form.

    Raises:
        Drop: empty, or not a list of objects with a role.
    """
    if value == []:
        raise Drop("empty_messages")
    if not isinstance(value, list):
        raise Drop("bad_messages")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Drop("bad_messages")
        if not isinstance(message.get("content"), str | list | None):
            raise Drop("bad_messages")
    return value


def images_in(conversation: list[dict[str, Any]]) -> int | None:
    """Parts of the conversation that are no text; None where there are none."""
    parts = [p for m in conversation if isinstance(m.get("content"), list) for p in m["content"]]
    return sum(1 for p in parts if isinstance(p, dict) and p.get("type") not in ("text", "input_text")) or None


def token_list(value: Any) -> list[int]:
    """Raises `Drop`: not a list of token ids."""
    if not isinstance(value, list) or not value:
        raise Drop("bad_token_ids")
    if any(not isinstance(t, int) or isinstance(t, bool) or not 0 <= t < 2**31 for t in value):
        raise Drop("bad_token_ids")
    return value


def sampling_of(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The sampling parameters of a request; None where it has none."""
    return {key: body[key] for key in SAMPLING_KEYS if body.get(key) is not None} or None


def request_body(body: Mapping[str, Any]) -> Row:
    """What a body of /v1/chat/completions, /v1/completions or /v1/responses asks for.

    Raises:
        Drop: no prompt, or one that is no text.
    """
    row: Row = {
        "max_tokens": limit_of(first_of(body, "max_completion_tokens", "max_tokens", "max_output_tokens")),
        "sampling": sampling_of(body),
        "tools": body.get("tools") if isinstance(body.get("tools"), list) and body["tools"] else None,
        "response_format": response_format(body),
    }
    if "messages" in body:
        row["messages"] = messages(body["messages"])
    elif isinstance(body.get("input"), list):
        row["messages"] = messages(body["input"])
    else:
        prompt = first_of(body, "prompt", "input")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if isinstance(prompt, str) and prompt:
            row["prompt"] = prompt
        elif isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            raise Drop("several_prompts_in_one_request")
        elif isinstance(prompt, list):
            row["token_ids"] = token_list(prompt)
        else:
            raise Drop("no_prompt")
    if "messages" in row:
        row["images"] = images_in(row["messages"])
    return row


def response_format(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """What restricts the output's form: `response_format`, or the engines' own guided decoding."""
    value = body.get("response_format")
    if isinstance(value, dict) and value.get("type") != "text":
        return value
    guided = {k: v for k, v in body.items() if (k.startswith("guided_") or k == "structured_outputs") and v}
    return guided or None


def first_of(record: Mapping[str, Any], *names: str) -> Any:
    """The value of the first name that the record has with a value."""
    return next((record[name] for name in names if record.get(name) is not None), None)
