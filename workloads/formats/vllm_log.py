"""vLLM server logs (`--enable-log-requests`): lines `Received request ID: ... params: SamplingParams(...)`. They give arrivals (to
the second, without a year), limits and sampling parameters; no text and no lengths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from workloads.rows import SAMPLING_KEYS, Batch, Drop, Row, batches
from workloads.source import Source
from workloads.times import number_in

_REQUEST = re.compile(r"(\d\d)-(\d\d) (\d\d:\d\d:\d\d).*?Received request (\S+?): ")
_PARAMETER = re.compile(r"(\w+)=(-?\d+(?:\.\d+)?(?:e-?\d+)?|True|False)(?=[,)])")
_NEUTRAL = {
    **{"n": (1,), "best_of": (1,), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "min_tokens": (0,), "ignore_eos": (False,)},
    **{"presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,)},
}
"""Values with which the log prints parameters that nobody set."""
_FIRST_YEAR = 2000  # a leap year, so that 29 February is a date


def matches(source: Source) -> bool:
    return source.kind == "text" and _REQUEST.search(source.head.decode("utf-8", "replace")) is not None


def read(source: Source) -> Iterator[Batch]:
    for batch in batches(_rows(source)):
        batch.notes = ("the log has no year and whole seconds only: requests of one second arrive together",)
        yield batch


def _rows(source: Source) -> Iterator[Row | Drop]:
    year, last_month = _FIRST_YEAR, 0
    for number, line in source.lines():
        text = line.decode("utf-8", "replace")
        found = _REQUEST.search(text)
        if found is None:
            continue  # any other log line
        month = int(found[1])
        year += last_month == 12 and month == 1
        last_month = month
        parameters = _sampling(text)
        if parameters is None:
            yield Drop("no_sampling_params")
            continue
        limit = parameters.get("max_tokens")
        yield {
            "time": f"{year}-{found[1]}-{found[2]} {found[3]}",
            "max_tokens": int(limit) if isinstance(limit, int) and 0 < limit < 2**40 else None,
            "sampling": {
                name: value
                for name, value in parameters.items()
                if name in SAMPLING_KEYS and value not in _NEUTRAL.get(name, ())
            }
            or None,
            "line": number,
        }


def _sampling(text: str) -> dict[str, Any] | None:
    """Numbers and switches of the last `SamplingParams(...)` of the line: a prompt before it may hold the same words."""
    start = text.rfind("SamplingParams(")
    if start < 0:
        return None
    words: dict[str, Any] = {"True": True, "False": False}
    return {name: words.get(value, number_in(value)) for name, value in _PARAMETER.findall(text[start:])}
