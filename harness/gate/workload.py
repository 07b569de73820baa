"""Which requests a gate sends: the same part for both sides of a block, another part in the next block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backends.types import WorkloadFacts
from harness.types import Load
from workloads.types import Request, Trace, WorkloadError


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace as a gate replays it, in closed loop at each of `batch_sizes`."""

    trace: Trace
    batch_sizes: tuple[int, ...]
    requests_per_turn: int
    max_output_tokens: int | None
    seed: int = 0

    @property
    def loads(self) -> tuple[Load, ...]:
        return tuple(Load(mode="closed", trace=self.trace.name, concurrency=batch) for batch in sorted(self.batch_sizes))

    def part(self, block: int) -> list[Request]:
        """The requests of one block: every n-th of the trace, so that each part holds all of its kinds.

        Raises:
            WorkloadError: the trace is shorter than one part.
        """
        requests = self.trace.requests()
        parts = len(requests) // self.requests_per_turn
        if parts < 1:
            raise WorkloadError(
                f"trace '{self.trace.name}' has {len(requests)} requests and a turn needs {self.requests_per_turn}: "
                "use a longer trace, or fewer with --requests"
            )
        return list(requests[block % parts :: parts][: self.requests_per_turn])

    def facts(self) -> WorkloadFacts:
        requests: Sequence[Request] = self.trace.requests()
        return WorkloadFacts(
            max_input_tokens=max((r.input_tokens for r in requests if r.input_tokens is not None), default=None),
            max_output_tokens=self.max_output_tokens or max((r.max_tokens for r in requests if r.max_tokens), default=None),
            sampling_parameters=frozenset(name for r in requests for name in r.sampling),
            structured_output=any(r.response_format for r in requests),
            tools=any(r.tools for r in requests),
        )

    def to_dict(self) -> dict[str, Any]:
        """What must be equal for two gates to be comparable."""
        return {
            "trace": self.trace.name,
            "sha256": self.trace.sha256,
            "batch_sizes": list(self.batch_sizes),
            "requests_per_turn": self.requests_per_turn,
            "max_output_tokens": self.max_output_tokens,
            "seed": self.seed,
        }
