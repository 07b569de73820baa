"""Acceptance by category, by context length and over time, from the chunks of one load's requests. Pure functions.

A chunk is what one engine step emitted, where the server does not merge steps and says how many tokens each chunk holds. Whether
it does shows in chunks that hold more than K + 1 tokens, and in their tau: where that is far from the counters', the breakdown is
left out instead of guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from harness.offline import CONTEXT_BUCKETS
from harness.statistics import ratio_estimate

TOLERANCE = 0.1
"""Largest relative difference between the tau of the chunks and the counters' at which a chunk is taken for a step. The counters
also hold the requests that lead into and out of a closed loop, so the two are never quite equal."""

TIME_PARTS = 4


@dataclass(frozen=True, slots=True)
class Group:
    """Sums over the decode steps of one group; a step whose context lies in another bucket counts there."""

    group: str
    requests: int
    steps: int
    tokens: int  # emitted by these steps
    first_accepted: int  # steps that emitted two tokens or more: the first draft token was accepted
    tau_ci95: tuple[float, float] | None = None

    @property
    def tau(self) -> float:
        return self.tokens / self.steps

    @property
    def first_position_rate(self) -> float:
        """Share of all decode steps, drafted or not."""
        return self.first_accepted / self.steps

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tau": self.tau, "first_position_rate": self.first_position_rate}


@dataclass(frozen=True, slots=True)
class Breakdown:
    """`missing` says why there is none; then all groups are empty."""

    by_category: tuple[Group, ...] = ()
    by_context: tuple[Group, ...] = ()
    by_time: tuple[Group, ...] = ()
    missing: str | None = None

    def to_dict(self) -> dict[str, Any]:
        parts = ("by_category", "by_context", "by_time")
        return {**{name: [g.to_dict() for g in getattr(self, name)] for name in parts}, "missing": self.missing}


def breakdown(records: pa.Table, tau: float | None, k: int) -> Breakdown:
    """The breakdown of a load with K = `k` whose `requests.parquet` is `records`; `tau` is what the server's counters gave."""
    steps = _steps(records)
    if steps is None:
        return Breakdown(missing="the server does not say how many tokens each chunk holds")
    if not len(steps["tokens"]):
        return Breakdown(missing="no request decoded more than one token")
    if (steps["tokens"] > k + 1).any():
        return Breakdown(missing=f"some chunks hold more than K + 1 = {k + 1} tokens: the server merges steps into chunks")
    of_chunks = float(steps["tokens"].mean())
    if tau is None or abs(of_chunks / tau - 1) > TOLERANCE:
        told = "not known" if tau is None else f"{tau:.3f}"
        return Breakdown(missing=f"chunks hold {of_chunks:.3f} tokens and a step {told}: the server merges steps into chunks")
    names = np.asarray([name or "none" for name in records["category"].to_pylist()], dtype=object)
    contexts = np.searchsorted(CONTEXT_BUCKETS, steps["context"], side="right")
    quarters = np.minimum((steps["share_of_load"] * TIME_PARTS).astype(int), TIME_PARTS - 1)
    labels = [f"{i + 1} of {TIME_PARTS}" for i in range(TIME_PARTS)]
    return Breakdown(
        by_category=_groups(steps, names[steps["request"]], sorted(set(names))),
        by_context=_groups(steps, np.asarray(_bucket_names(), dtype=object)[contexts], _bucket_names()),
        by_time=_groups(steps, np.asarray(labels, dtype=object)[quarters], labels),
    )


def _steps(records: pa.Table) -> dict[str, np.ndarray[Any, Any]] | None:
    """One row for each decode step of a completed request: request (row), tokens, context before it, share of the load passed."""
    columns: dict[str, list[np.ndarray[Any, Any]]] = {"request": [], "tokens": [], "context": [], "at": []}
    rows = zip(*(records[n].to_pylist() for n in ("status", "chunk_tokens", "chunk_s", "input_tokens")), strict=True)
    for number, (status, tokens, times, prompt) in enumerate(rows):
        if status != "completed":
            continue
        if tokens is None or (len(times) and not len(tokens)):
            return None
        sizes = np.asarray(tokens, dtype=float)
        columns["request"].append(np.full(max(len(sizes) - 1, 0), number))
        columns["tokens"].append(sizes[1:])
        columns["context"].append((prompt or 0) + np.cumsum(sizes)[:-1])
        columns["at"].append(np.asarray(times, dtype=float)[1:])
    if not columns["tokens"]:
        return {name: np.zeros(0) for name in ("request", "tokens", "context", "share_of_load")}
    found = {name: np.concatenate(parts) for name, parts in columns.items()}
    at = found.pop("at")
    span = at.max() - at.min() if len(at) else 0.0
    found["share_of_load"] = (at - at.min()) / span if span > 0 else np.zeros(len(at))
    found["request"] = found["request"].astype(int)
    return found


def _groups(steps: dict[str, np.ndarray[Any, Any]], labels: np.ndarray[Any, Any], order: Sequence[str]) -> tuple[Group, ...]:
    found = []
    for name in order:
        mine = labels == name
        if not mine.any():
            continue
        tokens, request = steps["tokens"][mine], steps["request"][mine]
        _, place = np.unique(request, return_inverse=True)
        tokens_of, steps_of = (np.bincount(place, weights=w).astype(np.float64) for w in (tokens, np.ones_like(tokens)))
        interval = ratio_estimate(tokens_of, steps_of).ci95
        counts = len(tokens_of), int(mine.sum()), int(tokens.sum()), int((tokens >= 2).sum())
        found.append(Group(str(name), *counts, tau_ci95=interval))
    return tuple(found)


def _bucket_names() -> list[str]:
    edges = [0, *CONTEXT_BUCKETS]
    return [
        *(f"{low:,} to {high - 1:,} tokens" for low, high in pairwise(edges)),
        f"{edges[-1]:,} and more",
    ]
