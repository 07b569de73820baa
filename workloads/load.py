"""Read a trace file of any known format."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from workloads.formats import FORMATS, Format, detect
from workloads.grade import grade_of
from workloads.rows import Batch
from workloads.source import Source
from workloads.times import UNITS_NS, Clock
from workloads.types import SCHEMA, Trace, WorkloadError

Window = tuple[float, float]
DEMO_TRACE = Path(__file__).with_name("samples") / "demo.jsonl"


def load_trace(
    path: str | Path,
    *,
    format: str | None = None,
    time_unit: str | None = None,
    window: Window | None = None,
    limit: int | None = None,
) -> Trace:
    """The trace in `path`, plain or compressed (gzip, Zstandard).

    Args:
        format: name of a format; None detects it from the content.
        time_unit: s, ms, us or ns; None takes the format's own or guesses, and notes the guess.
        window: seconds after the earliest row, start included, end excluded. The file is read as a stream, so memory grows with
            the window and not with the file.
        limit: most rows to keep, in the file's order; reading stops there, so `read` is what was read until then.

    Raises:
        WorkloadError: the file is missing, of no known format, holds no usable row, or a line of it cannot be read.
    """
    source = Source(Path(path))
    if time_unit is not None and time_unit not in UNITS_NS:
        raise WorkloadError(f"time unit '{time_unit}' is unknown; choose from {', '.join(UNITS_NS)}")
    if format is not None and format not in FORMATS:
        raise WorkloadError(f"format '{format}' is unknown; choose from {', '.join(FORMATS)}")
    chosen = FORMATS[format] if format else detect(source)
    with ThreadPoolExecutor(1) as hasher:
        sha256 = hasher.submit(lambda: source.sha256)
        collected = _Collector(chosen, time_unit, window, limit, base_ns=None)
        collected.read_all(source)
        if collected.must_start_over:
            collected = _Collector(chosen, time_unit, window, limit, base_ns=collected.earliest_ns)
            collected.read_all(source)
        return collected.trace(source, sha256.result())


class _Collector:
    """Takes in batches, places them in time, and keeps what the window and the limit leave."""

    def __init__(
        self, chosen: Format, time_unit: str | None, window: Window | None, limit: int | None, base_ns: int | None
    ) -> None:
        self._format = chosen
        self._clock = Clock(time_unit or chosen.exact_unit, chosen.usual_unit)
        self._window = window
        self._limit = limit
        self._base_ns = base_ns  # the earliest row's time, as far as known
        self.earliest_ns: int | None = None
        self._parts: list[pa.Table] = []
        self._times: list[NDArray[np.int64]] = []
        self._placed: list[NDArray[np.bool_]] = []
        self._kept = 0
        self._read = 0
        self._dropped: Counter[str] = Counter()
        self._notes: dict[str, None] = {}
        self._declared: str | None = None

    @property
    def must_start_over(self) -> bool:
        """Whether rows were judged against a window whose origin turned out to lie earlier."""
        return self._window is not None and self._base_ns != self.earliest_ns

    def read_all(self, source: Source) -> None:
        for batch in self._format.read(source):
            self._add(batch)
            if self._limit is not None and self._kept >= self._limit:
                self._notes[f"reading stopped after {self._limit} kept rows (limit)"] = None
                break

    def _add(self, batch: Batch) -> None:
        self._read += batch.read
        self._dropped.update(batch.dropped)
        self._notes.update(dict.fromkeys(batch.notes))
        if not batch.rows:
            return
        self._clock.unit = self._clock.unit or batch.unit
        self._declared = batch.grade or self._declared
        raw = batch.columns.pop("time")
        absent = np.array([value is None for value in raw]) if isinstance(raw, list) else np.zeros(len(raw), bool)
        times, valid = self._clock.to_ns(raw)
        keep = valid | absent
        if valid.any():
            first = int(times[valid].min())
            self.earliest_ns = first if self.earliest_ns is None else min(first, self.earliest_ns)
            self._base_ns = first if self._base_ns is None else self._base_ns
        self._drop("bad_time", ~keep)
        if self._window is not None:
            since = (times - (self._base_ns or 0)) / 1e9
            inside = valid & (since >= self._window[0]) & (since < self._window[1])
            self._drop("outside_window", keep & ~inside)
            keep &= inside
        if self._limit is not None:
            over = keep & (np.cumsum(keep) > self._limit - self._kept)
            last = int(np.argmax(over)) if over.any() else len(keep)
            self._drop("over_limit", over)
            keep[last:] = False
        self._keep(batch.columns, times, valid, keep)

    def _drop(self, reason: str, rows: NDArray[np.bool_]) -> None:
        if number := int(rows.sum()):
            self._dropped[reason] += number

    def _keep(
        self, columns: dict[str, Any], times: NDArray[np.int64], valid: NDArray[np.bool_], keep: NDArray[np.bool_]
    ) -> None:
        table = pa.table(columns) if columns else None
        if not keep.all():
            times, valid = times[keep], valid[keep]
            table = table.filter(pa.array(keep)) if table is not None else None
        if len(times) and table is not None:
            self._parts.append(table)
            self._times.append(times)
            self._placed.append(valid)
            self._kept += len(times)

    def trace(self, source: Source, sha256: str) -> Trace:
        if not self._kept:
            reasons = ", ".join(f"{reason} {n}" for reason, n in self._dropped.items()) or "no row was found"
            raise source.error(None, f"holds no usable request ({reasons})")
        table = pa.concat_tables(self._parts, promote_options="default")
        self._parts.clear()
        times, placed = np.concatenate(self._times), np.concatenate(self._placed)
        self._times.clear()
        table = _in_order(table)
        notes = [*self._notes, *self._clock.notes]
        if placed.any():
            everywhere = bool(placed.all())
            times -= int((times if everywhere else times[placed]).min())
            arrivals = times / 1e9
            del times
            table = table.add_column(0, "arrival_s", pa.array(arrivals, mask=None if everywhere else ~placed))
            if self._window is not None:
                notes.append(f"window {self._window[0]:g}-{self._window[1]:g} s; arrivals counted from its first row")
            table, backwards = _sorted(table, arrivals if everywhere else np.where(placed, arrivals, np.inf))
            if backwards:
                notes.append(f"{backwards} rows came before an earlier row's time: sorted by time, ties in file order")
        table = _after_previous_turn(table)
        grade, reason = grade_of(table, self._declared)
        return Trace(
            name=source.name,
            sha256=sha256,
            format=self._format.name,
            table=table,
            read=self._read,
            dropped=dict(self._dropped),
            grade=grade,
            grade_reason=reason,
            notes=tuple(notes),
        )


def _in_order(table: pa.Table) -> pa.Table:
    return table.select([name for name in SCHEMA.names if name in table.column_names])


def _sorted(table: pa.Table, times: NDArray[np.float64]) -> tuple[pa.Table, int]:
    """The table in stable order of time, and how many rows stood after a later one."""
    backwards = int((times[1:] < times[:-1]).sum())
    return (table.take(pa.array(np.argsort(times, kind="stable"))), backwards) if backwards else (table, 0)


def _after_previous_turn(table: pa.Table) -> pa.Table:
    """Rows that give a delay in place of a time arrive that long after the previous row of their session."""
    if "delay_s" not in table.column_names or not pc.any(pc.is_valid(table["delay_s"])).as_py():
        return table
    sessions = table["session_id"].to_pylist() if "session_id" in table.column_names else [None] * table.num_rows
    known = table["arrival_s"].to_pylist() if "arrival_s" in table.column_names else [None] * table.num_rows
    delays, lines = table["delay_s"].to_pylist(), table["line"].to_pylist()
    last: dict[Any, float] = {}
    arrivals: list[float | None] = list(known)
    for i in sorted(range(table.num_rows), key=lines.__getitem__):
        at = arrivals[i]
        if at is None and delays[i] is not None:
            at = arrivals[i] = last.get(sessions[i], 0.0) + delays[i]
        if at is not None:
            last[sessions[i]] = at
    if "arrival_s" in table.column_names:
        table = table.drop_columns(["arrival_s"])
    table = table.add_column(0, "arrival_s", pa.array(arrivals, pa.float64()))
    times = np.array([np.inf if a is None else a for a in arrivals])
    return _sorted(table, times)[0]
