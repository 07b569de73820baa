"""CSV by column name, as a stream of Arrow batches: the fast path for traces of millions of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
from numpy.typing import NDArray

from workloads.rows import Batch, Drop, count
from workloads.source import Source, plain_name

BLOCK_BYTES = 2 << 20
WRONG_FIELDS = "wrong_number_of_fields"
NEEDED = ("time", "input_tokens", "output_tokens")


@dataclass
class _Skipped:
    """Lines with too few or too many fields: they are counted, and keep their number."""

    numbers: list[int] = field(default_factory=list)

    def handle(self, row: pacsv.InvalidRow) -> str:
        self.numbers.append(row.number or 0)
        return "skip"


def table_batches(source: Source, columns: Mapping[str, str]) -> Iterator[tuple[Batch, dict[str, pa.Array]]]:
    """(batch with `line` and its account, wanted columns as text) for each block of rows; blank lines are no rows.

    `columns` maps plain column names to the names wanted; those the file lacks are left out.

    Raises:
        WorkloadError: the file cannot be cut into rows.
    """
    skipped = _Skipped()
    counted, next_line = 0, 2
    try:
        with source.open() as file, _reader(file, skipped) as reader:
            names = {name: columns[plain_name(name)] for name in reader.schema.names if plain_name(name) in columns}
            missing = [wanted for wanted in NEEDED if wanted not in names.values()]
            if missing:
                raise source.error(1, f"has no column for {', '.join(missing)}; choose another --format")
            for block, seen in _ahead(reader, skipped):
                numbers = _numbers(next_line, block.num_rows, skipped.numbers)
                next_line += len(numbers) and int(numbers[-1]) + 1 - next_line
                found = {wanted: block.column(name) for name, wanted in names.items()}
                blank = _blank(found)
                if blank is not None:
                    numbers = numbers[~blank]
                    found = {name: values.filter(pa.array(~blank)) for name, values in found.items()}
                wrong = seen - counted
                counted = seen
                batch = Batch({"line": pa.array(numbers)}, read=len(numbers) + wrong)
                if wrong:
                    batch.dropped[WRONG_FIELDS] = wrong
                yield batch, found
    except (pa.ArrowInvalid, OSError, EOFError) as error:
        detail = str(error).splitlines()[0]
        raise source.error(next_line, f"cannot be read as CSV ({detail}); correct the line or choose --format") from None


def _ahead(reader: pacsv.CSVStreamingReader, skipped: _Skipped) -> Iterator[tuple[pa.RecordBatch, int]]:
    """(block, lines skipped until its end); the next block is parsed while the caller works on this one."""

    def read() -> tuple[pa.RecordBatch, int]:
        return reader.read_next_batch(), len(skipped.numbers)

    with ThreadPoolExecutor(1) as parser:
        coming = parser.submit(read)
        while True:
            try:
                found = coming.result()
            except StopIteration:
                return
            coming = parser.submit(read)
            yield found


class _Ascii:
    """A file whose bytes beyond ASCII read as `?`: the parser hands lines to Python as text and cannot bear others."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        chunk = self._file.read(size)
        return chunk if chunk.isascii() else chunk.decode("ascii", "replace").encode("ascii", "replace")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


def _reader(file: IO[bytes], skipped: _Skipped) -> pacsv.CSVStreamingReader:
    header = file.peek(1 << 16).partition(b"\n")[0].decode("utf-8", "replace").rstrip("\r")  # type: ignore[attr-defined]
    names = header.split(",")
    return pacsv.open_csv(
        _Ascii(file),
        read_options=pacsv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES, column_names=names, skip_rows=1),
        parse_options=pacsv.ParseOptions(
            quote_char=False,  # numbers and names only; a stray quote must not swallow the lines after it
            ignore_empty_lines=False,  # so that line numbers hold
            invalid_row_handler=skipped.handle,
        ),
        convert_options=pacsv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False, check_utf8=False
        ),
    )


def _numbers(first: int, rows: int, skipped: list[int]) -> NDArray[np.int64]:
    """Line numbers of the next `rows` rows from line `first` on, those of skipped lines left out."""
    ahead = [number for number in skipped if number >= first]
    numbers = np.arange(first, first + rows + len(ahead), dtype=np.int64)
    return np.setdiff1d(numbers, ahead)[:rows] if ahead else numbers


def _blank(columns: Mapping[str, pa.Array]) -> NDArray[np.bool_] | None:
    """Rows in which every wanted column is empty; None where there are none."""
    blank: NDArray[np.bool_] | None = None
    for values in columns.values():
        if len(values) and pc.min(pc.binary_length(values)).as_py() > 0:
            return None
        empty = pc.equal(pc.binary_length(values), 0).to_numpy(zero_copy_only=False)
        blank = empty if blank is None else blank & empty
        if not blank.any():
            return None
    return blank


def counts(batch: Batch, found: dict[str, pa.Array], name: str, reason: str, *, zero: str | None = None) -> None:
    """Replace the text column `name` by whole numbers; rows without one are dropped from `batch` and `found` under `reason`,
    rows with 0 under `zero` (default `reason`)."""
    try:
        numbers = found[name].cast(pa.int64())
        if len(numbers) and pc.min(numbers).as_py() > 0:
            found[name] = numbers
            return
        bad = pc.less(numbers, 0).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        slow = [_count(value, reason) for value in found[name].to_pylist()]
        bad = np.array([value is None for value in slow], bool)
        numbers = pa.array([value or 0 for value in slow], pa.int64())
    found[name] = numbers
    nothing = pc.equal(numbers, 0).to_numpy(zero_copy_only=False) & ~bad
    for cause, rows in ((reason, bad), (zero or reason, nothing)):
        if number := int(rows.sum()):
            batch.dropped[cause] += number
    gone = bad | nothing
    if gone.any():
        keep = pa.array(~gone)
        found.update({key: values.filter(keep) for key, values in found.items()})
        batch.columns = {key: values.filter(keep) for key, values in batch.columns.items()}


def _count(value: str, reason: str) -> int | None:
    try:
        return count(value.strip().strip('"'), reason)
    except Drop:
        return None
