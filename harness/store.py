"""The run directory: every trial on disk the moment it ends, complete or not at all, so that a killed run loses nothing measured.

A trial is first written under a temporary name and then renamed: a folder `trials/NNNN` is always whole. Trials are found again
by a key over all that shapes their numbers; that is how the same `--out` resumes, also with a larger space.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from backends.files import write_whole
from backends.types import ConfigError, ServingConfig, SpecCounters
from harness.types import Load, Measurement, Role, State

EMPTY_QUALITY: Mapping[str, Any] = {"greedy_agreement": None, "mean_kl": None}


@dataclass(frozen=True, slots=True)
class Trial:
    """One load on one server, as `result.json` shows it. Only COMPLETE and PRUNED trials have metrics."""

    number: int
    state: State
    role: Role
    config: ServingConfig
    load: Load
    key: str
    stage: str
    requests: tuple[int, ...]  # indices in the trace: what pairs this trial with others
    reason: str | None = None
    metrics: Mapping[str, Any] | None = None
    speculation: Mapping[str, Any] | None = None
    engine: Mapping[str, Any] | None = None
    quality: Mapping[str, Any] = field(default_factory=lambda: EMPTY_QUALITY)
    cost: Mapping[str, Any] = field(default_factory=lambda: {"seconds": 0.0, "gpu_seconds": 0.0})
    warnings: tuple[str, ...] = ()
    worker: str | None = None  # where it was measured, if not in the process of the run itself

    @property
    def measured(self) -> bool:
        return self.state in ("COMPLETE", "PRUNED") and self.metrics is not None

    def to_dict(self) -> dict[str, Any]:
        out = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**out, "config": self.config.to_dict(), "load": self.load.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trial:
        lists = {"requests": tuple(data["requests"]), "warnings": tuple(data["warnings"])}
        return cls(
            **{**data, **lists, "config": ServingConfig.from_dict(data["config"]), "load": Load(**data["load"])},
        )


def trial_key(
    config: ServingConfig, load: Load, trace_sha256: str, requests: Sequence[int], conditions: Mapping[str, Any]
) -> str:
    """Hash of all that shapes a trial's numbers: two trials with equal keys measure the same thing for the same purpose.

    `conditions` holds what is neither configuration nor load: stage, output limit, seed, hardware, checkpoints, engine, base arguments.
    """
    parts = {
        "config": config.to_dict(),
        "load": load.to_dict(),
        "trace": trace_sha256,
        "requests": list(requests),
        "conditions": dict(conditions),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


class RunStore:
    """One run directory, held by one process at a time.

    Raises:
        ConfigError: another process works in the directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._trials_dir = directory / "trials"
        self._trials_dir.mkdir(parents=True, exist_ok=True)
        self._lock = open(directory / ".lock", "w")  # noqa: SIM115 - held as long as the store lives
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--out {directory}: another run works in this directory; wait for it or choose another"
            ) from None
        for leftover in self._trials_dir.glob("*.partial"):
            shutil.rmtree(leftover)
        self._trials = {trial.number: trial for trial in self._read_trials()}

    def close(self) -> None:
        self._lock.close()

    def _read_trials(self) -> Iterator[Trial]:
        for path in sorted(self._trials_dir.glob("*/trial.json")):
            yield Trial.from_dict(orjson.loads(path.read_bytes()))

    @property
    def trials(self) -> list[Trial]:
        return [self._trials[number] for number in sorted(self._trials)]

    def find(self, key: str) -> Trial | None:
        """The measured trial of this key. A failed one is not kept from being tried again."""
        return next((t for t in self.trials if t.key == key and t.measured), None)

    def next_number(self) -> int:
        return max(self._trials, default=-1) + 1

    def trial_dir(self, number: int) -> Path:
        return self._trials_dir / f"{number:04d}"

    @property
    def servers_dir(self) -> Path:
        """Where each server that is started has a folder for its log and files."""
        return self.directory / "servers"

    def note_server(self, name: str) -> None:
        """A server was started, maybe on another host, where its folder is."""
        (self.servers_dir / name).mkdir(parents=True, exist_ok=True)

    def add(
        self,
        trial: Trial,
        *,
        launch: Mapping[str, Any] | None = None,
        server_log: str | None = None,
        records: pa.Table | None = None,
        counters: SpecCounters | None = None,
    ) -> Trial:
        """Write a finished trial: all its files, then one rename."""
        partial = self._trials_dir / f"{trial.number:04d}.partial"
        partial.mkdir()
        if launch is not None:
            _write_json(partial / "launch.json", launch)
        if server_log is not None:
            (partial / "server.log").write_text(server_log)
        if records is not None:
            pq.write_table(records, partial / "requests.parquet")
        if counters is not None:
            _write_json(partial / "counters.json", asdict(counters))
        _write_json(partial / "trial.json", trial.to_dict())
        os.replace(partial, self.trial_dir(trial.number))
        self._trials[trial.number] = trial
        return trial

    def update(self, trial: Trial) -> Trial:
        """Write again what is said of a finished trial, if it is news; its records stay."""
        if self._trials[trial.number] != trial:
            _write_json(self.trial_dir(trial.number) / "trial.json", trial.to_dict())
            self._trials[trial.number] = trial
        return trial

    @property
    def server_starts(self) -> int:
        """Servers started for this directory so far, those of killed runs included."""
        return len(list(self.servers_dir.glob("*")))

    def records(self, trial: Trial) -> pa.Table:
        return pq.read_table(self.trial_dir(trial.number) / "requests.parquet")

    def write_config(self, settings: Mapping[str, Any]) -> None:
        text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
        write_whole(self.directory / "config.yaml", text)

    def write_json(self, name: str, data: Mapping[str, Any]) -> None:
        """Write ``DIR/name`` whole or not at all."""
        _write_json(self.directory / name, data)


def measurement_fields(measurement: Measurement) -> dict[str, Any]:
    """The parts of a `Trial` that a measurement fills."""
    return {
        "metrics": measurement.metrics(),
        "speculation": measurement.speculation.to_dict(),
        "warnings": measurement.warnings,
    }


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    write_whole(path, orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY, default=_jsonable))


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, frozenset | set):
        return sorted(value)
    raise TypeError(f"cannot write {type(value).__name__} as JSON")
