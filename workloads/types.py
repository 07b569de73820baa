"""What a workload is: one `Request`, and a `Trace` of many, stored by column.

A trace is read once, kept in columns (Arrow), and never changed: every operation on it (a window, a sub-sample, a pairing
with prompts) returns a new trace. Rows that could not be used are counted under a reason, so that
``read == kept + sum(dropped.values())`` holds for every trace at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

ContentGrade = Literal["A", "B", "C"]


class WorkloadError(Exception):
    """Input that cannot be used. The message is one line: what is wrong, where (file and line), what to do."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it will be sent.

    Exactly one of `messages`, `prompt`, `token_ids` is set where the trace has text; a trace of lengths has none of them and
    needs `workloads.prompts.attach_prompts` before it can be replayed.
    """

    index: int  # position in the trace, counted from 0 in arrival order; the key that pairs measurements
    arrival_s: float | None  # seconds after the trace's earliest request; None where the trace has no times
    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | None = None
    token_ids: Sequence[int] | None = None
    input_tokens: int | None = None  # as recorded by the source
    output_tokens: int | None = None  # as recorded by the source
    output_text: str | None = None  # recorded completion, where the source has it
    max_tokens: int | None = None  # the limit the caller set, where known
    sampling: Mapping[str, Any] = field(default_factory=dict)  # temperature, top_p, seed, stop, ... as the API has them
    tools: Sequence[Mapping[str, Any]] | None = None
    response_format: Mapping[str, Any] | None = None
    session_id: str | None = None
    category: str | None = None
    line: int | None = None  # line (or record) number in the source file, from 1
