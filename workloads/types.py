"""What a workload is: one `Request`, and a `Trace` of many, stored by column.

A trace is read once, kept by column (Arrow), and never changed: every operation on it (a window, a sub-sample, a pairing
with prompts) returns a new trace. Rows that could not be used are counted under a reason, so that
``read == kept + sum(dropped.values())`` holds for every trace at any time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

ContentGrade = Literal["A", "B", "C"]

SCHEMA = pa.schema(
    {
        "arrival_s": pa.float64(),  # after the earliest row; null where the source has no time
        "delay_s": pa.float64(),  # wait after the previous turn's answer, where the source has that in place of a time
        "messages": pa.large_string(),  # JSON array of {role, content, ...}
        "prompt": pa.large_string(),
        "token_ids": pa.large_list(pa.int64()),
        "input_tokens": pa.int64(),  # as recorded by the source
        "output_tokens": pa.int64(),
        "output_text": pa.large_string(),
        "max_tokens": pa.int64(),
        "sampling": pa.large_string(),  # JSON object
        "tools": pa.large_string(),  # JSON array
        "response_format": pa.large_string(),  # JSON object
        "session_id": pa.large_string(),
        "parent": pa.int64(),  # `line` of the row that this one continues
        "prefix_blocks": pa.large_list(pa.uint64()),  # ids of `block_size` tokens each; equal leading ids mean a shared prefix
        "block_size": pa.int64(),
        "images": pa.int64(),
        "category": pa.large_string(),
        "tenant": pa.large_string(),
        "source_status": pa.large_string(),
        "source_latency_s": pa.float64(),
        "line": pa.int64(),  # line or record number in the source file, from 1
    }
)
"""Every column that a trace can have. A column that its source does not know is absent from the table; within a column an
unknown value is null."""

JSON_COLUMNS = ("messages", "sampling", "tools", "response_format")


class WorkloadError(Exception):
    """Input that cannot be used. The message is one line: what is wrong, where (file and line), what to do."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it will be sent.

    Exactly one of `messages`, `prompt`, `token_ids` is set where the trace has text; a trace of lengths has none of them and
    needs `workloads.prompts.attach_prompts` before it can be replayed.
    """

    index: int  # position in the trace, counted from 0 in arrival order; the key that pairs measurements
    arrival_s: float | None  # seconds after the trace's earliest request; None where the trace has no times
    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | None = None
    token_ids: Sequence[int] | None = None
    input_tokens: int | None = None  # as recorded by the source
    output_tokens: int | None = None  # as recorded by the source
    output_text: str | None = None  # recorded completion, where the source has it
    max_tokens: int | None = None  # the limit the caller set, where known
    sampling: Mapping[str, Any] = field(default_factory=dict)  # temperature, top_p, seed, stop, ... as the API has them
    tools: Sequence[Mapping[str, Any]] | None = None
    response_format: Mapping[str, Any] | None = None
    session_id: str | None = None
    category: str | None = None
    line: int | None = None  # line (or record) number in the source file, from 1


@dataclass(frozen=True)
class Trace:
    """Many requests in arrival order, by column (`SCHEMA`), with an account of every row that the source held."""

    name: str  # file name
    sha256: str  # of the file as it lies on disk
    format: str
    table: pa.Table
    read: int
    dropped: Mapping[str, int]  # reason -> rows
    grade: ContentGrade
    grade_reason: str
    notes: tuple[str, ...] = ()  # what was guessed, changed or chosen, each for a person to read

    def __post_init__(self) -> None:
        if self.read != self.kept + sum(self.dropped.values()):
            raise ValueError(f"{self.name}: {self.read} rows read, {self.kept} kept, dropped {dict(self.dropped)}")

    def __len__(self) -> int:
        return self.table.num_rows

    @property
    def kept(self) -> int:
        return self.table.num_rows

    @property
    def has_text(self) -> bool:
        return any(self.known(name) for name in ("messages", "prompt", "token_ids"))

    @property
    def arrivals_s(self) -> NDArray[np.float64]:
        """[n] seconds after the earliest request; NaN where unknown."""
        return self.numbers("arrival_s")

    def known(self, column: str) -> int:
        """Rows in which `column` has a value."""
        if column not in self.table.column_names:
            return 0
        return len(self) - self.table[column].null_count

    def numbers(self, column: str) -> NDArray[np.float64]:
        """[n] a numeric column as float64; NaN where unknown."""
        if column not in self.table.column_names:
            return np.full(len(self), np.nan)
        return self.table[column].cast(pa.float64(), safe=False).to_numpy()

    def values(self, column: str) -> list[Any]:
        """[n] a column as Python values, JSON columns parsed; None where unknown."""
        if column not in self.table.column_names:
            return [None] * len(self)
        found = self.table[column].to_pylist()
        if column in JSON_COLUMNS:
            return [None if text is None else json.loads(text) for text in found]
        return found

    def requests(self) -> list[Request]:
        """Every row as a `Request`; `index` is its position in this trace."""
        columns = {name: self.values(name) for name in _REQUEST_COLUMNS if name in self.table.column_names}
        rows = zip(*columns.values(), strict=True) if columns else ()
        requests = [dict(zip(columns, row, strict=True)) for row in rows]
        return [
            Request(index=i, **{"arrival_s": None, **row, "sampling": row.get("sampling") or {}})
            for i, row in enumerate(requests)
        ]

    def select(self, indices: Iterable[int], *, reason: str = "not_selected", note: str | None = None) -> Trace:
        """The rows at `indices` (positions in this trace), in arrival order; the others count as dropped under `reason`."""
        chosen = sorted(indices)
        gone = len(self) - len(chosen)
        dropped = {**self.dropped, reason: self.dropped.get(reason, 0) + gone} if gone else self.dropped
        notes = (*self.notes, note) if note else self.notes
        return replace(self, table=self.table.take(pa.array(chosen, pa.int64())), dropped=dropped, notes=notes)

    def with_column(self, name: str, values: pa.Array | Sequence[Any], **changes: Any) -> Trace:
        """This trace with one column set; `changes` are other fields to replace."""
        array = values if isinstance(values, pa.Array) else pa.array(values, SCHEMA.field(name).type)
        table = self.table.drop_columns([name]) if name in self.table.column_names else self.table
        return replace(self, table=table.append_column(SCHEMA.field(name), array), **changes)

    def summary(self) -> dict[str, Any]:
        """The trace's entry in `result.json`: plain data, None where nothing is known."""
        arrivals = self.arrivals_s[~np.isnan(self.arrivals_s)]
        return {
            "trace": self.name,
            "sha256": self.sha256,
            "format": self.format,
            "read": self.read,
            "kept": self.kept,
            "dropped": dict(self.dropped),
            "content_grade": self.grade,
            "grade_reason": self.grade_reason,
            "span_s": float(arrivals.max() - arrivals.min()) if len(arrivals) else None,
            "input_tokens": percentiles(self.numbers("input_tokens")),
            "output_tokens": percentiles(self.numbers("output_tokens")),
            "notes": list(self.notes),
        }


_REQUEST_COLUMNS = tuple(name for name in SCHEMA.names if name in Request.__dataclass_fields__)


def percentiles(values: NDArray[np.float64]) -> dict[str, float | None]:
    """p50, p95 and max of the known values (linear interpolation); None where there are none."""
    known = values[~np.isnan(values)]
    if not len(known):
        return {"p50": None, "p95": None, "max": None}
    p50, p95 = np.percentile(known, (50, 95))
    return {"p50": float(p50), "p95": float(p95), "max": float(known.max())}
