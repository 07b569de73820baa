"""Times as traces write them: numbers in any unit, numeric strings, ISO 8601 with 0-9 digits of a second, with or without zone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

UNITS_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
EPOCH_FROM = {"ns": 1e17, "us": 1e14, "ms": 1e11, "s": 1e8}
"""From this size on a number is a Unix time in that unit (1973 and later)."""

_ISO = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9})\d*)?\s*(Z|z|UTC|[+-]\d\d(?::?\d\d)?)?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_BOUND_NS = 9.2e18  # int64


class Clock:
    """Turns the raw times of one file into nanoseconds; the unit of plain numbers is settled at the first batch that has any."""

    def __init__(self, unit: str | None = None, default: str | None = None) -> None:
        """`unit` is what the user says; `default` what the format usually has, None where its definition leaves no doubt open."""
        self.unit = unit
        self._default = default
        self.notes: list[str] = []
        self._absolute = False

    def to_ns(self, raw: pa.Array | Sequence[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """([n] nanoseconds, [n] whether the time could be read). Text without zone is taken as UTC."""
        if isinstance(raw, pa.Array) and not pa.types.is_floating(raw.type) and not pa.types.is_integer(raw.type):
            found = _iso_array(raw)
            if found is not None:
                self._absolute = True
                return found
            raw = raw.to_pylist()
        if isinstance(raw, pa.Array):
            numbers = raw.to_numpy(zero_copy_only=False)
            return self._scale(numbers)
        return self._mixed(raw)

    def _mixed(self, raw: Sequence[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        ns = np.zeros(len(raw), np.int64)
        valid = np.zeros(len(raw), bool)
        numeric: list[int] = []
        values: list[int | float] = []
        for i, given in enumerate(raw):
            value = given
            if isinstance(given, str):
                if (instant := iso_ns(given)) is not None:
                    ns[i], valid[i], self._absolute = instant, True, True
                    continue
                value = number_in(given)
            elif isinstance(given, datetime):
                aware = given if given.tzinfo else given.replace(tzinfo=UTC)
                ns[i], valid[i], self._absolute = (aware - _EPOCH) // timedelta(microseconds=1) * 1000, True, True
                continue
            if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _BOUND_NS:
                numeric.append(i)
                values.append(value)
        if numeric:
            exact = all(isinstance(v, int) for v in values)
            ns[numeric], valid[numeric] = self._scale(np.array(values, np.int64 if exact else np.float64))
        return ns, valid

    def _scale(self, numbers: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        finite = np.isfinite(numbers)
        if self.unit is None and finite.any():
            self.unit, note = guess_unit(numbers[finite], self._default)
            self.notes.append(note)
        factor = UNITS_NS[self.unit or "s"]
        valid = finite & (np.abs(np.where(finite, numbers, 0).astype(np.float64)) * factor < _BOUND_NS)
        usable = np.where(valid, numbers, 0)
        if self._absolute:  # beside dates, only a number that is a date too can be placed
            valid &= np.abs(usable) >= EPOCH_FROM[self.unit or "s"]
        if np.issubdtype(numbers.dtype, np.integer):
            return usable.astype(np.int64) * factor, valid
        return np.rint(usable * factor).astype(np.int64), valid


def guess_unit(numbers: NDArray[Any], default: str | None) -> tuple[str, str]:
    """The unit of plain numbers, and a sentence that says why.

    Large numbers are Unix times. Else fractions mean seconds; whole numbers are read in the format's usual unit unless that gives
    an absurd rate: over 500 requests a second for milliseconds, or one in 50 s or fewer for seconds.
    """
    size = float(np.median(np.abs(numbers)))
    for unit, least in EPOCH_FROM.items():
        if size >= least:
            return unit, f"times are Unix times in {unit} (by their size)"
    span = float(numbers.max() - numbers.min())
    gap = span / max(len(numbers) - 1, 1)
    whole = bool(np.all(numbers == np.rint(numbers)))
    if not whole:
        return "s", "times have fractions: taken as seconds; --time-unit overrides"
    if default == "ms" and 0 < gap < 2:
        return "s", f"whole numbers with a mean gap of {gap:.3g}: taken as seconds, not this format's ms; --time-unit overrides"
    if default != "ms" and gap >= 50:
        return "ms", f"whole numbers with a mean gap of {gap:.3g}: taken as milliseconds; --time-unit overrides"
    unit = default or "s"
    return unit, f"times taken as {'milliseconds' if unit == 'ms' else 'seconds'} (mean gap {gap:.3g}); --time-unit overrides"


def number_in(text: str) -> int | float | None:
    """A decimal number written as text; None for anything else."""
    text = text.strip()
    if not re.fullmatch(r"[+-]?\d+(\.\d*)?([eE][+-]?\d{1,3})?", text):
        return None
    return float(text) if set(text) & set(".eE") else int(text)


def iso_ns(text: str) -> int | None:
    """Nanoseconds since 1970 of an ISO 8601 time, exact to the ninth digit; None where it is none. No zone means UTC."""
    match = _ISO.fullmatch(text.strip())
    if not match:
        return None
    *parts, fraction, zone = match.groups()
    try:
        moment = datetime(*map(int, parts), tzinfo=UTC)  # type: ignore[misc, arg-type]  # six groups
    except ValueError:
        return None
    seconds = (moment - _EPOCH) // timedelta(seconds=1)
    if zone and zone[0] in "+-":
        digits = zone[1:].replace(":", "")
        offset = int(digits[:2]) * 3600 + int(digits[2:] or 0) * 60
        seconds -= offset if zone[0] == "+" else -offset
    ns = seconds * 10**9 + int((fraction or "0").ljust(9, "0"))
    return ns if abs(ns) < _BOUND_NS else None


def _iso_array(raw: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_]] | None:
    """All of a text column at once; None where not every value is plain ISO, so that they have to be read one by one."""
    if raw.null_count or not len(raw) or pc.min(pc.binary_length(raw)).as_py() < len("2023-11-16 18:15:46"):
        return None
    zoned = re.search(r"(Z|[+-]\d\d:?\d\d)$", raw[0].as_py())
    try:  # Arrow takes a column with a zone in every row, or one without any
        return raw.cast(pa.timestamp("ns", "UTC" if zoned else None)).cast(pa.int64()).to_numpy(), np.ones(len(raw), bool)
    except pa.ArrowInvalid:
        return None


def iso_text(ns: int) -> str:
    """The inverse of `iso_ns`, in UTC."""
    moment = _EPOCH + timedelta(seconds=ns // 10**9)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{ns % 10**9:09d}Z"
