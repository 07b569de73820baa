"""A finished run directory, read: the checked result and, on demand, the latencies of a trial's requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import yaml
from numpy.typing import NDArray

from harness.result_schema import validate
from reports.text import clean

LATENCIES = ("ttft_s", "tpot_s", "e2e_s")


class ReportError(Exception):
    """A run directory that cannot be shown. One line: what, where, what to do."""


@dataclass(frozen=True, slots=True)
class Requests:
    """The completed requests of one trial, by ascending index: n latencies each, in seconds, NaN where undefined."""

    index: NDArray[np.int64]
    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]
    e2e_s: NDArray[np.float64]


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: what is derived from a run is cached by it
class RunData:
    """What a report shows. `result` is cleaned of control characters, credentials and (by default) workload text."""

    folder: Path
    result: Mapping[str, Any]
    settings: str | None  # the content of config.yaml
    _cache: dict[int, Requests | None] = field(default_factory=dict)

    @property
    def trials(self) -> list[Mapping[str, Any]]:
        return list(self.result["trials"])

    def requests(self, number: int) -> Requests | None:
        """Latencies of trial `number`; None where it has no records."""
        if number not in self._cache:
            self._cache[number] = _read_requests(self.folder / "trials" / f"{number:04d}" / "requests.parquet")
        return self._cache[number]


def _read_requests(path: Path) -> Requests | None:
    if not path.exists():
        return None
    table = pq.read_table(path, columns=["index", "status", *LATENCIES], use_threads=False)
    table = table.filter(np.asarray(table["status"].to_pylist()) == "completed").sort_by("index")
    columns = {name: table[name].to_numpy().astype(np.float64) for name in LATENCIES}
    return Requests(index=table["index"].to_numpy().astype(np.int64), **columns)


def load_run(folder: Path, *, show_text: bool) -> RunData:
    """Read and check a run directory.

    Raises:
        ReportError: there is no result, or it is not JSON.
        ResultError: the result breaks the schema.
    """
    path = folder / "result.json"
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ReportError(f"{folder}: no result.json; give the --out directory of a run that has finished") from None
    except ValueError as error:
        raise ReportError(f"{path}: not JSON ({error}); the run did not end, start it again with the same --out") from None
    validate(result)
    config = folder / "config.yaml"
    settings = None
    if config.exists():
        plain = clean(yaml.safe_load(config.read_text(encoding="utf-8")), show_text=True)
        settings = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    return RunData(folder, clean(result, show_text=show_text), settings)
