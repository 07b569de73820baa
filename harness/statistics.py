"""Estimates with intervals, each with its estimand: pure functions on arrays and on `requests.parquet` tables.

Closed loop estimates what the *workload* would show: its requests are a sample, drawn again by the bootstrap (whole sessions
where they exist, since turns of one session are not independent). Open loop estimates *this trace on this engine*: its requests
share one queue, so drawing them again says nothing of the next replay; intervals come from several replays
(`harness.replicates`) or not at all. An interval that the sample cannot carry is None, with a note of how much it would need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]
Groups = NDArray[np.int64]
Interval = tuple[float, float]

RESAMPLES = 1000  # enough for a standard error; no percentile of them is used
BLOCK = 2_000_000  # elements of one block of resampled values
MIN_REQUESTS = 60  # for medians, means and ratios in closed loop
MIN_REQUESTS_P95 = 300
BEYOND = 10  # requests beyond a quantile from which on it can be resampled; order statistics give its interval below that


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


def resamples(n: int, groups: Groups | None, seed: int, count: int = RESAMPLES) -> Iterator[NDArray[np.int64]]:
    """`count` sets of row numbers, in blocks of equal length [resamples, rows]; whole groups are drawn together."""
    rng = np.random.default_rng(seed)
    if groups is None:
        left = count
        while left:
            block = min(left, max(1, BLOCK // n))
            yield rng.integers(0, n, size=(block, n))
            left -= block
        return
    order = np.argsort(groups, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
    for _ in range(count):
        yield np.concatenate([members[j] for j in rng.integers(0, len(members), len(members))])[None, :]


def quantile_estimate(values: Array, quantile: float, groups: Groups | None = None, seed: int = 0) -> Estimate:
    """A quantile of closed-loop requests, NaN excluded. Estimand: the workload's quantile at this concurrency."""
    value = float(np.quantile(values, quantile))
    size = len(values) if groups is None else len(np.unique(groups))
    note = too_few(size, requests_needed(quantile), f"p{quantile * 100:g}", groups)
    if note:
        return Estimate(value, None, note)
    if groups is None and size * min(quantile, 1 - quantile) < BEYOND:
        return Estimate(value, order_statistic_interval(values, quantile))
    draws = [smooth_quantile(values[rows], quantile) for rows in resamples(len(values), groups, seed)]
    return Estimate(value, log_interval(value, np.concatenate(draws), size))


def ratio_estimate(numerators: Array, denominators: Array, groups: Groups | None = None) -> Estimate:
    """Σ numerators ÷ Σ denominators, weighted by size and never a mean of ratios; jackknife over rows or groups.

    The standard error is that of log ratios with one part left out (Efron & Tibshirani, An Introduction to the Bootstrap, section 11.2),
    which of 60 requests of unequal length is a little larger, and covers better, than the bootstrap's.
    """
    if groups is not None:
        of_row = np.unique(groups, return_inverse=True)[1]
        numerators, denominators = (np.bincount(of_row, part).astype(float) for part in (numerators, denominators))
    value = float(numerators.sum() / denominators.sum())
    size = len(numerators)
    note = too_few(size, MIN_REQUESTS, "a ratio", groups)
    if note:
        return Estimate(value, None, note)
    without = np.log((numerators.sum() - numerators) / (denominators.sum() - denominators))
    error = math.sqrt((size - 1) * float(without.var()))
    effective = float(
        denominators.sum() ** 2 / (denominators**2).sum()
    )  # Kish: a few long requests weigh as much as many short
    half = float(stats.t.ppf(0.975, effective - 1)) * error
    return Estimate(value, (value / math.exp(half), value * math.exp(half)))


def closed_throughput(tokens: Array, times: Array, concurrency: int, groups: Groups | None = None, seed: int = 0) -> Estimate:
    """Tokens per second while all slots are busy: concurrency × Σ tokens ÷ Σ time in the slot, requests in the order sent.

    A long prompt delays everybody beside it, so neighbours are not independent: the bootstrap draws stretches of 2 × concurrency
    requests (moving blocks; Künsch 1989) and needs three of them. Blocks that overlap know their variance with half again the degrees of
    freedom of those that do not (Meketon & Schmeiser 1984). Where sessions spread wider than that, theirs is taken.
    """
    independent = ratio_estimate(concurrency * tokens, times, groups)
    block = 2 * concurrency
    needed = max(MIN_REQUESTS, 3 * block)
    if independent.ci95 is None or len(tokens) < needed:
        note = independent.note or too_few(len(tokens), needed, f"throughput at {concurrency} at a time")
        return Estimate(independent.value, None, note)
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, len(tokens), (RESAMPLES, -(-len(tokens) // block)))
    rows = (starts[:, :, None] + np.arange(block)).reshape(RESAMPLES, -1)[:, : len(tokens)] % len(tokens)
    draws = concurrency * tokens[rows].sum(axis=1) / times[rows].sum(axis=1)
    found = log_interval(independent.value, draws, len(tokens) / block, freedom=1.5 * len(tokens) / block - 1)
    wider = groups is not None and independent.ci95[1] - independent.ci95[0] > found[1] - found[0]
    return independent if wider else Estimate(independent.value, found)


def log_interval(value: float, draws: Array, size: float, *, freedom: float | None = None) -> Interval:
    """`value` × exp(± t · standard error of the logarithm): Student's t with the bootstrap's standard error, which falls short by
    √(1 − 1 ÷ size) (Efron & Tibshirani, An Introduction to the Bootstrap, section 5.3), for a sample of `size` independent parts, which
    know it with `freedom` degrees of freedom (size − 1 unless given).

    For positive statistics. At 60 requests it covers better than percentiles of the draws, which are too narrow for ratios.
    """
    half = float(stats.t.ppf(0.975, freedom or size - 1) * np.log(draws).std() * math.sqrt(size / (size - 1)))
    return value / math.exp(half), value * math.exp(half)


def too_few(size: int, needed: int, what: str, groups: Groups | None = None) -> str | None:
    if size >= needed:
        return None
    unit = "requests" if groups is None else "sessions"
    return f"{size} {unit} are too few for an interval of {what}: it needs {needed}"


# Paired comparisons of two trials on the same requests.


def smooth_quantile(values: Array, quantile: float) -> Array:
    """Harrell and Davis (1982): a mean of all order statistics [..., n] weighted by a beta distribution around the quantile.

    Resampled medians of few values jump between neighbours, which makes a bootstrap of their ratio too wide by a fifth or more;
    this one moves with every value.
    """
    return np.asarray(np.sort(values, axis=-1) @ _harrell_davis(values.shape[-1], quantile))


@lru_cache
def _harrell_davis(n: int, quantile: float) -> Array:
    edges = stats.beta.cdf(np.arange(n + 1) / n, (n + 1) * quantile, (n + 1) * (1 - quantile))
    return np.asarray(np.diff(edges))


@dataclass(frozen=True, slots=True)
class PairedSample:
    """What two trials measured on the same requests, and how it compares: a log ratio above 0 says that the second is faster."""

    resampled: Callable[[NDArray[np.int64]], Array]  # row numbers [..., n] -> log ratio of each resample
    groups: Groups | None  # sessions
    rows: int

    @property
    def log_ratio(self) -> float:
        return float(self.resampled(np.arange(self.rows)))

    @property
    def size(self) -> int:
        """Requests, or sessions, that the bootstrap draws."""
        return self.rows if self.groups is None else len(np.unique(self.groups))

    def draws(self, seed: int, count: int = RESAMPLES) -> Array:
        return np.concatenate([self.resampled(rows) for rows in resamples(self.rows, self.groups, seed, count)])


def column(table: pa.Table, name: str) -> Array:
    """A column as floats, null as NaN."""
    return table[name].to_numpy(zero_copy_only=False).astype(float)


def common_rows(tables: Sequence[pa.Table], *columns: str) -> list[pa.Table]:
    """Of each table the requests that completed and have all `columns` in every table, in the same order."""

    def usable(table: pa.Table) -> dict[int, int]:
        good = np.asarray([status == "completed" for status in table["status"].to_pylist()], dtype=bool)
        for name in columns:
            good &= ~np.isnan(column(table, name))
        return {int(index): row for row, index in enumerate(table["index"].to_pylist()) if good[row]}

    found = [usable(table) for table in tables]
    common = sorted(set.intersection(*(set(rows) for rows in found)))
    return [table.take(pa.array([rows[i] for i in common], pa.int64())) for table, rows in zip(tables, found, strict=True)]


def quantile_sample(off: pa.Table, on: pa.Table, metric: str, quantile: float) -> PairedSample:
    """Ratio of a quantile of `metric` (`smooth_quantile`, which is steadier than the two samples' own), off ÷ on; the tables hold
    the same requests (`common_rows`), one at least."""
    a, b = column(off, metric), column(on, metric)
    return PairedSample(
        lambda rows: np.log(smooth_quantile(a[rows], quantile) / smooth_quantile(b[rows], quantile)),
        groups_of(off["session"].to_pylist()),
        len(a),
    )


def throughput_sample(off: pa.Table, on: pa.Table) -> PairedSample:
    """Output tokens per second, on ÷ off, in closed loop at equal concurrency: with every slot always busy, throughput is
    concurrency × Σ tokens ÷ Σ time in the slot, and the concurrency cancels."""
    time_off, time_on = column(off, "e2e_s"), column(on, "e2e_s")
    tokens_off, tokens_on = column(off, "output_tokens"), column(on, "output_tokens")

    def ratio(rows: NDArray[np.int64]) -> Array:
        rate_on = tokens_on[rows].sum(axis=-1) / time_on[rows].sum(axis=-1)
        return np.asarray(np.log(rate_on / (tokens_off[rows].sum(axis=-1) / time_off[rows].sum(axis=-1))))

    return PairedSample(ratio, groups_of(off["session"].to_pylist()), len(time_off))


def paired_speedup(off: pa.Table, on: pa.Table, metric: str = "e2e_s", quantile: float = 0.5, *, seed: int = 0) -> Estimate:
    """Quantile of `metric` with off ÷ with on, over the requests that both completed; above 1 speculation is faster.

    Estimand: the ratio that the workload would show in *these two runs*. The bootstrap draws requests, each with both of its
    measurements; what a server's start or the machine does to all requests of a run is not in it, see `harness.replicates`.
    The value is NaN where no request is common.
    """
    off, on = common_rows((off, on), metric)
    if not len(off):
        return NOTHING_COMMON
    sample = quantile_sample(off, on, metric, quantile)
    return within_runs(sample, requests_needed(quantile), f"the speed-up of p{quantile * 100:g}", seed)


def paired_throughput(off: pa.Table, on: pa.Table, *, seed: int = 0) -> Estimate:
    """Output tokens per second with on ÷ with off (`throughput_sample`), in these two runs; above 1 speculation is faster."""
    off, on = common_rows((off, on), "e2e_s", "output_tokens")
    if not len(off):
        return NOTHING_COMMON
    return within_runs(throughput_sample(off, on), MIN_REQUESTS, "a ratio of throughputs", seed)


NOTHING_COMMON = Estimate(math.nan, None, "no request was completed in both trials")


def within_runs(sample: PairedSample, needed: int, what: str, seed: int) -> Estimate:
    """The ratio with its interval over requests alone."""
    value = math.exp(sample.log_ratio)
    note = too_few(sample.size, needed, what, sample.groups)
    if note:
        return Estimate(value, None, note)
    return Estimate(value, log_interval(value, np.exp(sample.draws(seed)), sample.size))
