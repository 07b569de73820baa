"""Estimates with intervals, each with its estimand: pure functions on arrays and on `requests.parquet` tables.

Closed loop estimates what the *workload* would show: its requests are a sample, drawn again by the bootstrap (whole sessions
where they exist, since turns of one session are not independent). Open loop estimates *this trace on this engine*: its requests
share one queue, so drawing them again says nothing of the next replay; intervals come from several replays
(`harness.replicates`) or not at all. An interval that the sample cannot carry is None, with a note of how much it would need.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]
Groups = NDArray[np.int64]
Interval = tuple[float, float]

RESAMPLES = 2000
BLOCK = 2_000_000  # elements of one block of resampled values
MIN_REQUESTS = 60  # for medians, means and ratios in closed loop
MIN_REQUESTS_P95 = 300


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % interval; `note` says why there is none."""

    value: float
    ci95: Interval | None = None
    note: str | None = None

    @property
    def log_se(self) -> float | None:
        """Standard error of the logarithm (a ratio's), from the width of the interval."""
        if self.ci95 is None or self.ci95[0] <= 0:
            return None
        return math.log(self.ci95[1] / self.ci95[0]) / (2 * 1.96)


def requests_needed(quantile: float) -> int:
    """Requests from which on a quantile gets an interval in closed loop: 60 for medians, 300 for p95, 368 for p99."""
    if quantile <= 0.5:
        return MIN_REQUESTS
    return max(MIN_REQUESTS_P95, order_statistics_needed(quantile))


def order_statistics_needed(quantile: float, confidence: float = 0.95) -> int:
    """Smallest n at which either extreme misses the quantile with at most half of 1 − confidence; 72 for p95, 368 for p99."""
    return math.ceil(math.log((1 - confidence) / 2) / math.log(max(quantile, 1 - quantile)))


def order_statistic_interval(values: Array, quantile: float, confidence: float = 0.95) -> Interval | None:
    """Distribution-free interval of a quantile from independent values (David & Nagaraja, Order Statistics, section 7.1).

    The ranks (l, u) with u − l smallest for which P(l <= B < u) >= `confidence`, B ~ Binomial(n, quantile); among equals the
    one with the largest probability. None where the sample is too small for any.
    """
    n = len(values)
    cdf = stats.binom.cdf(np.arange(-1, n + 1), n, quantile)  # cdf[r] = P(B < r)
    lows = np.arange(1, n + 1)
    highs = np.searchsorted(cdf, cdf[lows] + confidence)
    lows, highs = lows[highs <= n], highs[highs <= n]
    if not len(lows):
        return None
    best = min(range(len(lows)), key=lambda i: (highs[i] - lows[i], cdf[lows[i]] - cdf[highs[i]]))
    ordered = np.sort(values)
    return float(ordered[lows[best] - 1]), float(ordered[highs[best] - 1])


def groups_of(sessions: list[str | None]) -> Groups | None:
    """A number for each row, equal within a session; None where every row is a session of its own."""
    numbers: dict[str, int] = {}
    found = [numbers.setdefault(s, len(numbers)) if s is not None else -1 - i for i, s in enumerate(sessions)]
    return np.asarray(found) if len(set(found)) < len(found) else None


def resamples(n: int, groups: Groups | None, seed: int) -> Iterator[NDArray[np.int64]]:
    """`RESAMPLES` sets of row numbers, in blocks of equal length [resamples, rows]; whole groups are drawn together."""
    rng = np.random.default_rng(seed)
    if groups is None:
        left = RESAMPLES
        while left:
            block = min(left, max(1, BLOCK // n))
            yield rng.integers(0, n, size=(block, n))
            left -= block
        return
    order = np.argsort(groups, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
    for _ in range(RESAMPLES):
        yield np.concatenate([members[j] for j in rng.integers(0, len(members), len(members))])[None, :]


def quantile_estimate(values: Array, quantile: float, groups: Groups | None = None, seed: int = 0) -> Estimate:
    """A quantile of closed-loop requests, NaN excluded. Estimand: the workload's quantile at this concurrency."""
    value = float(np.quantile(values, quantile))
    size = len(values) if groups is None else len(np.unique(groups))
    note = too_few(size, requests_needed(quantile), f"p{quantile * 100:g}", groups)
    if note:
        return Estimate(value, None, note)
    if groups is None:
        return Estimate(value, order_statistic_interval(values, quantile))
    draws = [np.quantile(values[rows], quantile, axis=1) for rows in resamples(len(values), groups, seed)]
    return Estimate(value, percentile_interval(np.concatenate(draws)))


def ratio_estimate(numerators: Array, denominators: Array, groups: Groups | None = None, seed: int = 0) -> Estimate:
    """Σ numerators ÷ Σ denominators, weighted by size and never a mean of ratios; bootstrap over rows or groups."""
    value = float(numerators.sum() / denominators.sum())
    size = len(numerators) if groups is None else len(np.unique(groups))
    note = too_few(size, MIN_REQUESTS, "a ratio", groups)
    if note:
        return Estimate(value, None, note)
    draws = [numerators[rows].sum(axis=1) / denominators[rows].sum(axis=1) for rows in resamples(len(numerators), groups, seed)]
    return Estimate(value, percentile_interval(np.concatenate(draws)))


def percentile_interval(draws: Array) -> Interval:
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


def too_few(size: int, needed: int, what: str, groups: Groups | None = None) -> str | None:
    if size >= needed:
        return None
    unit = "requests" if groups is None else "sessions"
    return f"{size} {unit} are too few for an interval of {what}: it needs {needed}"


# Paired comparisons of two trials on the same requests.


def column(table: pa.Table, name: str) -> Array:
    """A column as floats, null as NaN."""
    return table[name].to_numpy(zero_copy_only=False).astype(float)


def paired_rows(off: pa.Table, on: pa.Table, *columns: str) -> tuple[pa.Table, pa.Table]:
    """The requests that both completed and for which both have all `columns`, in the same order."""

    def usable(table: pa.Table) -> dict[int, int]:
        good = np.asarray([status == "completed" for status in table["status"].to_pylist()], dtype=bool)
        for name in columns:
            good &= ~np.isnan(column(table, name))
        return {int(index): row for row, index in enumerate(table["index"].to_pylist()) if good[row]}

    rows_off, rows_on = usable(off), usable(on)
    common = sorted(rows_off.keys() & rows_on.keys())
    places_off, places_on = ([rows[i] for i in common] for rows in (rows_off, rows_on))
    return off.take(pa.array(places_off, pa.int64())), on.take(pa.array(places_on, pa.int64()))


def paired_speedup(off: pa.Table, on: pa.Table, metric: str = "e2e_s", quantile: float = 0.5, *, seed: int = 0) -> Estimate:
    """Quantile of `metric` with off ÷ with on, over the requests that both completed; above 1 speculation is faster.

    Estimand: the ratio that the workload would show on these two servers. The bootstrap draws requests, each with both of its
    measurements. For closely paired requests it is conservative: in simulation it covered 99 % instead of 95 (80 requests whose
    paired noise is a fifth of their spread). What one server's start does to all requests of a trial is not in it; see
    `harness.replicates`.
    The value is NaN where no request is common.
    """
    off, on = paired_rows(off, on, metric)
    if not len(off):
        return Estimate(math.nan, None, "no request was completed in both trials")
    a, b = column(off, metric), column(on, metric)
    groups = groups_of(off["session"].to_pylist())
    value = float(np.quantile(a, quantile) / np.quantile(b, quantile))
    size = len(a) if groups is None else len(np.unique(groups))
    note = too_few(size, requests_needed(quantile), f"the speed-up of p{quantile * 100:g}", groups)
    if note:
        return Estimate(value, None, note)
    draws = [
        np.quantile(a[rows], quantile, axis=1) / np.quantile(b[rows], quantile, axis=1)
        for rows in resamples(len(a), groups, seed)
    ]
    return Estimate(value, percentile_interval(np.concatenate(draws)))


def paired_throughput(off: pa.Table, on: pa.Table, *, seed: int = 0) -> Estimate:
    """Output tokens per second with on ÷ with off in closed loop at equal concurrency; above 1 speculation is faster.

    With every slot always busy, throughput is concurrency × Σ tokens ÷ Σ time in the slot, and the concurrency cancels.
    """
    off, on = paired_rows(off, on, "e2e_s", "output_tokens")
    if not len(off):
        return Estimate(math.nan, None, "no request was completed in both trials")
    time_off, time_on = column(off, "e2e_s"), column(on, "e2e_s")
    tokens_off, tokens_on = column(off, "output_tokens"), column(on, "output_tokens")
    groups = groups_of(off["session"].to_pylist())

    def ratio(rows: NDArray[np.int64]) -> Array:
        rate_on = tokens_on[rows].sum(axis=-1) / time_on[rows].sum(axis=-1)
        return np.asarray(rate_on / (tokens_off[rows].sum(axis=-1) / time_off[rows].sum(axis=-1)))

    value = float(ratio(np.arange(len(time_off))))
    note = too_few(len(time_off) if groups is None else len(np.unique(groups)), MIN_REQUESTS, "a ratio of throughputs", groups)
    if note:
        return Estimate(value, None, note)
    return Estimate(value, percentile_interval(np.concatenate([ratio(r) for r in resamples(len(time_off), groups, seed)])))
