"""The bytes of a trace file: decompressed, cut into lines or records, with the place of everything known for error messages."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal, cast

import orjson
import zstandard

from workloads.types import WorkloadError

HEAD_BYTES = 1 << 18
BOM = b"\xef\xbb\xbf"
_CSV_HEADER = re.compile(rb"[A-Za-z_\"][\w \".-]*(,[\w \".-]+)+")
Kind = Literal["json_lines", "json", "csv", "text", "parquet"]

PICKLE_REFUSED = (
    "is a pickle, which runs code when it is read; convert it where you trust it: load it there and write one JSON object a "
    "line with prompt or messages, max_tokens, output, temperature"
)


class Truncated:
    """Stands for a last line that was cut off while it was written."""


TRUNCATED = Truncated()


@dataclass(frozen=True)
class Source:
    """One trace file."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    def error(self, line: int | None, what: str) -> WorkloadError:
        return WorkloadError(f"{self.name}{'' if line is None else f':{line}'}: {what}")

    @cached_property
    def sha256(self) -> str:
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def open(self) -> IO[bytes]:
        """Decompressed bytes from the start, without a byte order mark.

        Raises:
            WorkloadError: there is no such file, or it cannot be opened.
        """
        try:
            raw = self.path.open("rb")
        except OSError as error:
            raise WorkloadError(f"{self.path}: cannot be read ({error.strerror}); give the path of a trace file") from None
        magic = raw.read(4)
        raw.seek(0)
        file: IO[bytes] = raw
        if magic[:2] == b"\x1f\x8b":
            file = cast(IO[bytes], gzip.GzipFile(fileobj=raw))
        elif magic == b"\x28\xb5\x2f\xfd":
            file = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        file = io.BufferedReader(cast(Any, file), 1 << 20) if file is not raw else file
        try:
            if cast(io.BufferedReader, file).peek(3)[:3] == BOM:
                file.read(3)
        except (OSError, EOFError, zstandard.ZstdError) as error:
            raise self.error(None, f"cannot be decompressed ({error})") from None
        return file

    @cached_property
    def head(self) -> bytes:
        """The first bytes, enough to tell the format."""
        with self.open() as file:
            try:
                return file.read(HEAD_BYTES)
            except (OSError, EOFError, zstandard.ZstdError) as error:
                raise self.error(None, f"cannot be decompressed ({error})") from None

    @cached_property
    def kind(self) -> Kind:
        """What the bytes are.

        Raises:
            WorkloadError: empty, or a pickle.
        """
        head = self.head
        if head[:4] == b"PAR1":
            return "parquet"
        if len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5:
            raise self.error(None, PICKLE_REFUSED)
        text = head.strip()
        if not text:
            raise self.error(None, "is empty; a trace needs at least one request")
        first = text.partition(b"\n")[0].rstrip()
        if re.match(rb"\[\s*[\[{\"\]]", text):
            return "json"
        if text[:1] == b"{":
            return (
                "json" if first[-1:] in (b"{", b"[", b",") else "json_lines"
            )  # a line that goes on is a document over several
        return "csv" if _CSV_HEADER.fullmatch(first) else "text"

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """The first few records that are objects; empty where the file holds no records."""
        found = []
        if self.kind in ("json_lines", "json", "parquet"):
            try:
                for _, record in self.records():
                    if isinstance(record, dict):
                        found.append(record)
                    if len(found) >= 8:
                        break
            except WorkloadError:
                if self.kind != "json_lines":
                    raise
        return found

    @property
    def header(self) -> list[str]:
        """Column names of a CSV file, in lower case, without spaces and underscores."""
        if self.kind != "csv":
            return []
        first = self.head.lstrip().partition(b"\n")[0].decode("utf-8", "replace")
        return [plain_name(name) for name in first.split(",")]

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(number from 1, line) of each line that is not blank, cut at line feeds only; ends as in the file."""
        number = 0
        with self.open() as file:
            try:
                for line in file:
                    number += 1
                    if not line.isspace():
                        yield number, line
            except (OSError, EOFError, zstandard.ZstdError) as error:
                raise self.error(number + 1, f"cannot be decompressed ({error})") from None

    def records(self) -> Iterator[tuple[int, Any]]:
        """(number from 1, value) of each JSON line, element of a JSON array, CSV row or Parquet row; (1, value) of another JSON
        document. `TRUNCATED` stands for a last JSON line that was cut off.

        Raises:
            WorkloadError: what cannot be parsed, with its line.
        """
        if self.kind == "parquet":
            yield from self._parquet_rows()
        elif self.kind == "json":
            value = self.document
            yield from enumerate(value if isinstance(value, list) else [value], 1)
        elif self.kind == "csv":
            with io.TextIOWrapper(self.open(), "utf-8", errors="replace", newline="") as text:
                csv.field_size_limit(2**31 - 1)  # a prompt in a field is longer than the 128 KiB that Python grants
                reader = csv.DictReader(text)
                try:
                    for row in reader:
                        yield reader.line_num, {key: value for key, value in row.items() if key is not None}
                except (csv.Error, OSError, EOFError, zstandard.ZstdError) as error:
                    raise self.error(reader.line_num, f"cannot be read as CSV ({error})") from None
        else:
            for number, line in self.lines():
                yield number, self.parse(number, line)

    def parse(self, number: int, line: bytes) -> Any:
        """One JSON line. A last line without an end that is not JSON counts as cut off."""
        try:
            return orjson.loads(line)
        except orjson.JSONDecodeError as error:
            value = _json(line)
            if value is not None:
                return value
            if not line.endswith(b"\n"):
                return TRUNCATED
            raise self.error(number, f"is not JSON ({error.msg} at column {error.colno}); correct or remove the line") from None

    @cached_property
    def document(self) -> Any:
        """The whole file as one JSON value."""
        with self.open() as file:
            content = file.read()
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise self.error(error.lineno, f"is not JSON ({error.msg} at column {error.colno})") from None

    def _parquet_rows(self) -> Iterator[tuple[int, Any]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        number = 0
        try:
            with pq.ParquetFile(self.path) as file:
                for batch in file.iter_batches(batch_size=4096):
                    for row in batch.to_pylist():
                        number += 1
                        yield number, row
        except (pa.ArrowException, OSError) as error:
            raise self.error(number + 1, f"is not readable Parquet ({str(error).splitlines()[0]})") from None


def plain_name(name: str) -> str:
    """A column name for comparison: lower case, without spaces, underscores and quotes."""
    return name.strip().strip('"').lower().replace(" ", "").replace("_", "")


def _json(text: bytes) -> Any:
    """The JSON value; Python's spelling of NaN and infinity is accepted too. None where it is neither."""
    try:
        value = json.loads(text.decode())
        orjson.dumps(value)  # refuses what is no text in UTF-8, and integers beyond 64 bits
    except (ValueError, RecursionError, TypeError):
        return None
    return value
