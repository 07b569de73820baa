"""baseline.json: a baseline recorded once and compared with later, on equal hardware, versions and workload only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.files import write_whole
from backends.types import ConfigError
from harness.gate.live import LiveSource
from harness.gate.session import OutOfTime
from harness.gate.types import Block, Sample
from harness.gate.workload import Workload

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class StoredBaseline:
    side: Mapping[str, Any]
    workload: Mapping[str, Any]
    environment: Mapping[str, Any]
    created: str
    blocks: tuple[tuple[Sample, Sample], ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "created": self.created,
            "side": dict(self.side),
            "workload": dict(self.workload),
            "environment": dict(self.environment),
            "blocks": [[sample.to_dict() for sample in pair] for pair in self.blocks],
        }

    def write(self, path: Path) -> None:
        write_whole(path, json.dumps(self.to_dict(), indent=1) + "\n")


def read_baseline(path: Path) -> StoredBaseline:
    """
    Raises:
        ConfigError: the file is missing or no baseline.
    """
    try:
        data = json.loads(path.read_text())
        if data["schema"] != SCHEMA:
            raise ConfigError(f"{path}: schema {data['schema']} is not {SCHEMA}; record it again with --record")
        blocks = tuple((Sample.from_dict(first), Sample.from_dict(second)) for first, second in data["blocks"])
        return StoredBaseline(data["side"], data["workload"], data["environment"], data["created"], blocks)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; write it with --record") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{path}: no baseline that --record wrote") from None


def refuse_unequal(path: Path, stored: StoredBaseline, environment: Mapping[str, Any], workload: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: hardware, versions or workload differ; it names what does.
    """
    found = [
        *_differences("environment", stored.environment, environment),
        *_differences("workload", stored.workload, workload),
    ]
    if found:
        raise ConfigError(
            f"{path} was recorded elsewhere, so it cannot be compared with: {'; '.join(found)}. "
            "Record it again here, or compare live: --baseline '<options>'"
        )


def _differences(name: str, before: Any, now: Any) -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted(before.keys() | now.keys()):
            if key != "fingerprint":  # it says that something differs, not what
                yield from _differences(f"{name}.{key}", before.get(key), now.get(key))
    elif before != now:
        yield f"{name} was {before}, is {now}"


class StoredSource:
    """Stored blocks as the baseline, measured ones as the candidate, on the same requests."""

    def __init__(self, stored: StoredBaseline, live: LiveSource) -> None:
        self.stored = stored
        self.live = live

    @property
    def method(self) -> str:
        return self.live.method

    def elapsed_s(self) -> float:
        return self.live.elapsed_s()

    def block(self, number: int) -> Block:
        first, second = self.live.turns(number, ("candidate", "candidate"))
        return Block(self.stored.blocks[number], (first, second))


def record(live: LiveSource, *, blocks: int, budget_s: float) -> tuple[tuple[Sample, Sample], ...]:
    """Measure the baseline alone, as many blocks as fit into the budget and at most `blocks`."""
    found: list[tuple[Sample, Sample]] = []
    longest_s = 0.0
    while len(found) < blocks and live.elapsed_s() + longest_s <= budget_s:
        begun_s = live.elapsed_s()
        try:
            first, second = live.turns(len(found), ("baseline", "baseline"))
        except OutOfTime:
            break
        found.append((first, second))
        longest_s = max(longest_s, live.elapsed_s() - begun_s)
    return tuple(found)


def workload_of(stored: StoredBaseline, workload: Workload) -> Workload:
    """`workload` with the loads of the recording, so that a gate against it needs no options repeated."""
    known = stored.workload
    return Workload(
        workload.trace,
        tuple(known["batch_sizes"]),
        known["requests_per_turn"],
        known["max_output_tokens"],
        known["seed"],
    )
