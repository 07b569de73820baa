"""Choose a part of a trace. Everything is seeded, and says in the trace's notes what it did."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from workloads.types import Trace, WorkloadError

PREFIX_CHARS = 200
"""Two prompts that agree in this many leading characters share a prefix, where the trace has no block ids."""


def thin(trace: Trace, share: float, *, seed: int) -> Trace:
    """Keep each session, or each request that belongs to none, with probability `share`: the rate falls, its shape stays.

    Raises:
        WorkloadError: `share` is not in (0, 1], or nothing is left.
    """
    if not 0 < share <= 1:
        raise WorkloadError(f"--thin {share:g}: give the share of requests to keep, above 0 and at most 1")
    sessions = trace.values("session_id")
    keys = [f"row {i}" if session is None else session for i, session in enumerate(sessions)]
    draws = dict(zip(dict.fromkeys(keys), np.random.default_rng(seed).random(len(set(keys))), strict=True))
    kept = [i for i, key in enumerate(keys) if draws[key] < share]
    if not kept:
        raise WorkloadError(f"{trace.name}: --thin {share:g} leaves none of {len(trace)} requests; keep a larger share")
    return trace.select(kept, reason="thinned", note=f"thinned to {share:g} of the sessions (seed {seed})")


def jitter(trace: Trace, quantum_s: float, *, seed: int) -> Trace:
    """Each arrival moved later by a uniform draw from [0, `quantum_s`): undoes the rounding of times to a grid.

    Raises:
        WorkloadError: `quantum_s` is not above 0.
    """
    if not quantum_s > 0 or not math.isfinite(quantum_s):
        raise WorkloadError(f"--jitter {quantum_s:g}: give seconds above 0")
    arrivals = trace.arrivals_s + np.random.default_rng(seed).random(len(trace)) * quantum_s
    arrivals -= np.nanmin(arrivals) if trace.known("arrival_s") else 0
    order = np.argsort(arrivals, kind="stable")
    moved = replace(trace, table=trace.table.take(pa.array(order)))
    values = pa.array(arrivals[order], from_pandas=True)
    return moved.with_column(
        "arrival_s", values, notes=(*trace.notes, f"arrivals jittered by up to {quantum_s:g} s (seed {seed})")
    )


def representative(trace: Trace, n: int, *, seed: int) -> list[int]:
    """Positions of `n` requests (all where there are fewer) that stand for the whole trace, in arrival order.

    Rows are ordered by category, prefix sharing, input and output length, and every (rows ÷ n)-th is taken from a random start:
    each stratum gets its share to within one request.
    """
    return _systematic(trace, range(len(trace)), n, seed)


def hold_out(trace: Trace, taken: Sequence[int], n: int, *, seed: int) -> list[int]:
    """Positions of `n` requests that stand for the trace and are not among `taken`. Where too few are left, all of them, filled
    up from `taken`."""
    rest = sorted(set(range(len(trace))) - set(taken))
    if len(rest) >= n:
        return _systematic(trace, rest, n, seed)
    again = _systematic(trace, sorted(taken), n - len(rest), seed)
    return sorted([*rest, *again])


def distance(trace: Trace, chosen: Sequence[int]) -> dict[str, float | None]:
    """How far a part lies from the whole, each from 0 (equal) to 1; None where the trace does not know.

    `input` and `output`: largest gap between the distributions of lengths (Kolmogorov-Smirnov). `category`: half the summed
    differences of shares (total variation). `prefix`: difference in the share of requests that share a prefix.
    """
    rows = np.array(sorted(chosen), np.int64)
    categories = trace.values("category")
    shared = shares_prefix(trace)
    return {
        "input": _largest_gap(lengths(trace, "input"), rows),
        "output": _largest_gap(lengths(trace, "output"), rows),
        "category": _variation(categories, [categories[i] for i in rows]) if trace.known("category") else None,
        "prefix": float(abs(shared[rows].mean() - shared.mean())) if len(rows) else None,
    }


def lengths(trace: Trace, side: str) -> NDArray[np.float64]:
    """[n] tokens of input or output as recorded; where no row has them, characters of the prompt, or the output limit."""
    found = trace.numbers(f"{side}_tokens")
    if not np.isnan(found).all():
        return found
    if side == "output":
        return trace.numbers("max_tokens")
    for name in ("messages", "prompt", "token_ids"):
        sizes = (
            np.array([math.nan if v is None else len(v) for v in trace.table[name].to_pylist()]) if trace.known(name) else found
        )
        found = np.where(np.isnan(found), sizes, found)
    return found


def shares_prefix(trace: Trace) -> NDArray[np.bool_]:
    """[n] whether another request begins in the same way: same first block, or same first `PREFIX_CHARS` characters."""
    keys: list[object] = [None] * len(trace)
    for name in ("prefix_blocks", "prompt", "messages"):
        if trace.known(name):
            found = trace.table[name].to_pylist()
            firsts = [_beginning(value) for value in found]
            keys = [first if key is None else key for key, first in zip(keys, firsts, strict=True)]
    uses = Counter(key for key in keys if key is not None)
    return np.array([key is not None and uses[key] > 1 for key in keys], bool)


def _beginning(value: object) -> object:
    if isinstance(value, str):
        return value[:PREFIX_CHARS] if len(value) >= PREFIX_CHARS else None
    return value[0] if isinstance(value, list) and value else None


def _systematic(trace: Trace, among: Iterable[int], n: int, seed: int) -> list[int]:
    rows = np.array(list(among), np.int64)
    if len(rows) <= n:
        return rows.tolist()
    inputs, outputs = (np.nan_to_num(lengths(trace, side), nan=-1.0)[rows] for side in ("input", "output"))
    groups = {name: i for i, name in enumerate(sorted(set(trace.values("category")), key=str))}
    category = np.array([groups[name] for name in trace.values("category")])[rows]
    quartile = np.searchsorted(np.quantile(inputs, (0.25, 0.5, 0.75)), inputs)
    order = np.lexsort((rows, outputs, quartile, shares_prefix(trace)[rows], category))
    start = np.random.default_rng(seed).random()
    picks = np.floor((np.arange(n) + start) * len(rows) / n).astype(np.int64)
    return sorted(rows[order[picks]].tolist())


def _largest_gap(values: NDArray[np.float64], rows: NDArray[np.int64]) -> float | None:
    whole, part = np.sort(values[~np.isnan(values)]), values[rows]
    part = np.sort(part[~np.isnan(part)])
    if not len(whole) or not len(part):
        return None
    gaps = np.searchsorted(part, whole, side="right") / len(part) - np.searchsorted(whole, whole, side="right") / len(whole)
    return float(np.abs(gaps).max())


def _variation(whole: Sequence[object], part: Sequence[object]) -> float | None:
    if not part:
        return None
    a, b = Counter(whole), Counter(part)
    return sum(abs(a[key] / len(whole) - b[key] / len(part)) for key in a) / 2
