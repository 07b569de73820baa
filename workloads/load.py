"""Read a trace file of any known format."""

from __future__ import annotations

from pathlib import Path

from workloads.types import Trace, WorkloadError


def load_trace(
    path: str | Path,
    *,
    format: str | None = None,
    time_unit: str | None = None,
    window: tuple[float, float] | None = None,
    limit: int | None = None,
) -> Trace:
    """The trace in `path`.

    Args:
        format: name of a format; None detects it from the content.
        time_unit: s, ms, us or ns; None takes the format's own or guesses, and notes the guess.
        window: seconds after the earliest row, start included, end excluded.
        limit: most rows to keep; reading stops there.

    Raises:
        WorkloadError: the file is missing, of no known format, or a line of it cannot be read.
    """
    raise WorkloadError("not read yet")
