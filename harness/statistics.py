"""Estimates with intervals, each with its estimand: pure functions on arrays and on `requests.parquet` tables.

Closed loop estimates what the *workload* would show: its requests are a sample, drawn again by the bootstrap (sessions where
they exist, since turns of one session are not independent). Open loop estimates *this trace on this engine*: its requests share
one queue, so resampling them says nothing of the next replay; intervals come from several replays (`replay_interval`) or not at
all. An interval that the sample cannot carry is None, with a note that says how much it would need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]
Interval = tuple[float, float]

RESAMPLES = 2000
MIN_REPLAYS = 5
MIN_REQUESTS = 60  # medians, means, ratios
MIN_REQUESTS_P95 = 300


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % interval; `note` says why there is none. `log_se` is the standard error of a ratio's logarithm."""

    value: float
    ci95: Interval | None = None
    note: str | None = None
    log_se: float | None = None


def requests_needed(quantile: float) -> int:
    """Requests from which on a quantile gets an interval in closed loop."""
    if quantile <= 0.5:
        return MIN_REQUESTS
    return max(MIN_REQUESTS_P95 if quantile <= 0.95 else 0, order_statistics_needed(quantile), MIN_REQUESTS)


def order_statistics_needed(quantile: float, confidence: float = 0.95) -> int:
    """Smallest n whose extremes enclose the quantile with `confidence`: 1 − q^n − (1 − q)^n >= confidence. 72 for p95, 368 for p99."""
    n = 2
    while 1 - quantile**n - (1 - quantile) ** n < confidence:
        n += 1
    return n


def order_statistic_interval(values: Array, quantile: float, confidence: float = 0.95) -> Interval | None:
    """Distribution-free interval of a quantile from independent values (David & Nagaraja, Order Statistics, 7.1).

    The narrowest pair of ranks around the quantile that encloses it with `confidence`; None where no pair does.
    """
    n = len(values)
    if n < order_statistics_needed(quantile, confidence):
        return None
    # P(X_(l) <= quantile value < X_(u)) = P(l <= B < u) with B ~ Binomial(n, quantile); ranks from 1.
    cdf = stats.binom.cdf(np.arange(n + 1), n, quantile)
    below = np.concatenate([[0.0], cdf[:-1]])[:n]  # P(B < rank) for ranks 1.. is cdf[rank - 1]
    lows = np.arange(1, n + 1)
    best: tuple[int, int] | None = None
    for low in lows[(cdf[lows - 1] <= 1 - confidence)]:
        high = int(np.searchsorted(cdf, confidence + cdf[low - 1])) + 1
        if high <= n and (best is None or high - low < best[1] - best[0]):
            best = (int(low), high)
    del below
    if best is None:
        return None
    ordered = np.sort(values)
    return float(ordered[best[0] - 1]), float(ordered[best[1] - 1])


def resample(
    groups: NDArray[np.int64] | None, n: int, rng: np.random.Generator, resamples: int = RESAMPLES
) -> list[NDArray[np.int64]]:
    """Index sets of a bootstrap: over the n rows, or over whole groups (sessions) where rows are not independent."""
    if groups is None:
        return list(rng.integers(0, n, size=(resamples, n)))
    members = [np.flatnonzero(groups == g) for g in np.unique(groups)]
    return [np.concatenate([members[j] for j in rng.integers(0, len(members), len(members))]) for _ in range(resamples)]
