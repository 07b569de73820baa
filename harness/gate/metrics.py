"""The metrics a gate compares, in one table, and their names for people. A key is `NAME@CONCURRENCY`: ``e2e_p50@8``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.gate.types import Question


@dataclass(frozen=True, slots=True)
class Metric:
    label: str
    question: Question
    unit: str  # s, tokens, tokens/s, 1/s, share, sequences
    higher_is_better: bool = False
    relative: bool = True  # compared as a ratio; else as a difference
    required: bool = False  # a pass needs this one shown equal; the others can turn a gate red, and do not hold up a pass
    tail: bool = False  # gates only with enough requests
    gates: bool = True  # False: shown, and never a reason


METRICS: dict[str, Metric] = {
    "tau": Metric("tau", "acceptance", "tokens", higher_is_better=True, required=True),
    "step": Metric("step time", "step_cost", "s", required=True),
    "e2e_p50": Metric("E2E p50", "latency", "s", required=True),
    "tpot_p50": Metric("TPOT p50", "latency", "s"),
    "ttft_p50": Metric("TTFT p50", "latency", "s"),
    "e2e_p95": Metric("E2E p95", "latency", "s", tail=True),
    "ttft_p95": Metric("TTFT p95", "latency", "s", tail=True),
    "throughput": Metric("throughput", "latency", "tokens/s", higher_is_better=True, required=True),
    "goodput": Metric("goodput", "latency", "1/s", higher_is_better=True),
    "batch": Metric("mean batch", "step_cost", "sequences", gates=False),
}
_POSITION = re.compile(r"position_(\d+)")


def key(name: str, concurrency: int) -> str:
    return f"{name}@{concurrency}"


def is_position(metric_key: str) -> bool:
    return _POSITION.match(metric_key) is not None


def metric_of(metric_key: str) -> Metric:
    """The table's row for a key; a position rate has one for each position."""
    name = metric_key.partition("@")[0]
    position = _POSITION.fullmatch(name)
    if position:
        return Metric(f"position {position[1]} rate", "acceptance", "share", higher_is_better=True, relative=False)
    return METRICS[name]


def label_of(metric_key: str, *, several_loads: bool) -> str:
    label = metric_of(metric_key).label
    return f"{label} at concurrency {metric_key.partition('@')[2]}" if several_loads else label
