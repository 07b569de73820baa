"""What several runs say together: intervals of an open loop, and comparisons that hold against run-to-run noise.

A server's start and the machine's state move all requests of a run together, which no bootstrap within one run can see. The unit
here is therefore the run (or an interleaved pair of runs), and intervals are Student's t over runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
from scipy import stats

from harness.statistics import (
    MIN_REQUESTS,
    NOTHING_COMMON,
    Array,
    Estimate,
    PairedSample,
    column,
    common_rows,
    paired_speedup,
    paired_throughput,
    quantile_sample,
    requests_needed,
    throughput_sample,
    too_few,
)

MIN_REPLAYS = 5
MIN_PAIRS = 2
FEW_PAIRS, EITHER_QUANTILE = 3, 0.985
QUEUE_QUANTILE = 0.98
"""What a queue or a last request decides is skewed: of five replays t at 0.975 covers 92.5-95 % (`benchmarks/coverage.py`)."""
EFFECT = 0.05
"""Relative change for which an undecided comparison says how many runs would show it."""
RESAMPLES_OF_A_VARIANCE = 500
Verdict = Literal["better", "worse", "equivalent", "inconclusive"]


def replay_interval(values: Sequence[float]) -> Estimate:
    """One statistic of each of several replays of one trace. Estimand: its mean over replays of this trace on this engine.

    Student's t at `QUEUE_QUANTILE`.
    """
    mean = float(np.mean(values))
    if len(values) < MIN_REPLAYS:
        return Estimate(mean, None, f"{len(values)} replays are too few for an interval in open loop: it needs {MIN_REPLAYS}")
    half = float(stats.t.ppf(QUEUE_QUANTILE, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    return Estimate(mean, (mean - half, mean + half))


def paired_runs(off: Sequence[float], on: Sequence[float], shared_variance: float | None = None) -> Estimate:
    """Speed-up from interleaved pairs of runs: the geometric mean of off ÷ on of one statistic (E2E p50, ...) of each run.

    Student's t over pairs: two pairs give an interval that only a large effect escapes, each further pair narrows it fast.
    `shared_variance` is that part of the variance of the log ratio which all pairs have in common, so that their differences do
    not show it (they sent the same requests); the degrees of freedom of the sum are Satterthwaite's (1946). Runs of the same
    requests can also be compared within each side, which gives the variance with twice the degrees of freedom, or far too much of
    it where the machine drifts from pair to pair. So up to `FEW_PAIRS` the narrower of both intervals holds, each at
    `EITHER_QUANTILE`: without any drift it then covers 94.7-95.3 %, with drift more.

    Raises:
        ValueError: the runs are not in pairs.
    """
    sides = np.log(np.asarray(off, dtype=float)), np.log(np.asarray(on, dtype=float))
    logs = sides[0] - sides[1]
    value, pairs = float(np.mean(logs)), len(logs)
    if pairs < MIN_PAIRS:
        return Estimate(math.exp(value), None, f"1 pair of runs shows no run-to-run noise: it needs {MIN_PAIRS} or more")
    if shared_variance is not None and pairs <= FEW_PAIRS:
        half, total = min(_half_width(groups, shared_variance, EITHER_QUANTILE) for groups in (sides, (logs,)))
    else:
        half, total = _half_width((logs,), shared_variance or 0.0, 0.975)
    note = None
    if abs(value) <= half:
        needed = pairs_needed(math.sqrt(pairs * total), EFFECT)
        note = f"{needed} pairs of runs would show a change of {EFFECT:.0%}"
    return Estimate(math.exp(value), (math.exp(value - half), math.exp(value + half)), note)


def _half_width(groups: Sequence[Array], shared_variance: float, quantile: float) -> tuple[float, float]:
    """Student's t for a mean over pairs whose variance is the sum of that of `groups`, and the variance."""
    pairs = len(groups[0])
    between = sum(float(np.var(group, ddof=1)) for group in groups) / pairs
    total = between + shared_variance
    freedom = len(groups) * (pairs - 1) * (total / between) ** 2 if between > 0 else math.inf
    return float(stats.t.ppf(quantile, freedom)) * math.sqrt(total), total


def speedup_of_runs(
    off: Sequence[pa.Table], on: Sequence[pa.Table], metric: str = "e2e_s", quantile: float = 0.5, *, seed: int = 0
) -> Estimate:
    """`statistics.paired_speedup` from several runs of each side, `off[i]` and `on[i]` neighbours in time.

    Estimand: the ratio that the workload would show over further starts of both servers. The pairs may all send the same requests
    or each a part of its own. One pair gives the interval of these two runs alone.

    Raises:
        ValueError: the runs are not in pairs.
    """
    if len(off) == len(on) == 1:
        return paired_speedup(off[0], on[0], metric, quantile, seed=seed)
    what = f"the speed-up of p{quantile * 100:g}"
    return _of_runs(
        off, on, (metric,), lambda a, b: quantile_sample(a, b, metric, quantile), requests_needed(quantile), what, seed
    )


def throughput_of_runs(off: Sequence[pa.Table], on: Sequence[pa.Table], *, seed: int = 0) -> Estimate:
    """`statistics.paired_throughput` from several runs of each side, as `speedup_of_runs`."""
    if len(off) == len(on) == 1:
        return paired_throughput(off[0], on[0], seed=seed)
    columns = ("e2e_s", "output_tokens")
    return _of_runs(off, on, columns, throughput_sample, MIN_REQUESTS, "a ratio of throughputs", seed)


def replayed_speedup(off: Sequence[pa.Table], on: Sequence[pa.Table], metric: str = "e2e_s", quantile: float = 0.5) -> Estimate:
    """Quantile of `metric`, off ÷ on, from pairs of replays of one trace; no interval under `MIN_REPLAYS` pairs.

    Estimand: the ratio on *this trace*. Its requests share a queue, so nothing is drawn again: only replays tell.
    """
    pairs = _pair_by_pair(off, on, (metric,))
    if not pairs:
        return NOTHING_COMMON
    offs, ons = ([float(np.quantile(column(table, metric), quantile)) for table in side] for side in zip(*pairs, strict=True))
    found = paired_runs(offs, ons)
    if len(pairs) < MIN_REPLAYS:
        return Estimate(found.value, None, f"{len(pairs)} pairs of replays are too few in open loop: it needs {MIN_REPLAYS}")
    return found


def _of_runs(
    off: Sequence[pa.Table],
    on: Sequence[pa.Table],
    columns: tuple[str, ...],
    compare: Callable[[pa.Table, pa.Table], PairedSample],
    needed: int,
    what: str,
    seed: int,
) -> Estimate:
    common = common_rows([*off, *on], *columns)
    same = 2 * len(common[0]) >= min(len(table) for table in (*off, *on))
    pairs = list(zip(common[: len(off)], common[len(off) :], strict=True)) if same else _pair_by_pair(off, on, columns)
    if not pairs:
        return NOTHING_COMMON
    samples = [compare(a, b) for a, b in pairs]
    size = samples[0].size if same else sum(sample.size for sample in samples)
    if same:  # every run as slow as the first of off, times so much
        offs, ons = (np.exp([compare(run, pairs[0][0]).log_ratio for run in side]) for side in zip(*pairs, strict=True))
        found = paired_runs(offs.tolist(), ons.tolist(), _shared(samples, seed))
    else:
        found = paired_runs(np.exp([s.log_ratio for s in samples]).tolist(), [1.0] * len(samples))
    note = too_few(size, needed, what, samples[0].groups)
    return Estimate(found.value, None, note) if note else found


def _pair_by_pair(off: Sequence[pa.Table], on: Sequence[pa.Table], columns: tuple[str, ...]) -> list[tuple[pa.Table, pa.Table]]:
    found = [tuple(common_rows(pair, *columns)) for pair in zip(off, on, strict=True)]
    return [(a, b) for a, b in found if len(a)]


def _shared(samples: Sequence[PairedSample], seed: int) -> float:
    """Variance of the mean log ratio that comes from which requests the workload gave, by the bootstrap over requests.

    With V of one pair = shared + own, and V of the mean of R pairs = shared + own ÷ R, both are known from the two.
    """
    draws = np.array(
        [sample.draws(seed, RESAMPLES_OF_A_VARIANCE) for sample in samples]
    )  # [R, resamples]: the same requests in each row
    one, mean, runs = float(draws.var(axis=1).mean()), float(draws.mean(axis=0).var()), len(samples)
    own = (one - mean) * runs / (runs - 1) if runs > 1 else 0.0
    return max(0.0, mean - own / runs)


def noise_floor(log_ratios: Sequence[float]) -> float:
    """Standard error of a paired difference of logarithms, from A/A pairs: their root mean square, since their mean is 0."""
    return float(np.sqrt(np.mean(np.square(log_ratios))))


def verdict(speedup: Estimate, margin: float = 0.0) -> Verdict:
    """better, worse: the interval excludes 1 ± margin (superiority). equivalent: it lies within 1 ± margin (two one-sided tests
    at 2.5 %; Schuirmann 1987). Otherwise inconclusive."""
    if speedup.ci95 is None:
        return "inconclusive"
    low, high = speedup.ci95
    if low > 1 + margin:
        return "better"
    if high < 1 / (1 + margin):
        return "worse"
    return "equivalent" if margin and low > 1 / (1 + margin) and high < 1 + margin else "inconclusive"


def pairs_needed(noise: float, effect: float, power: float = 0.9) -> int:
    """Pairs of runs that find a true ratio of 1 + `effect` with `power` at 95 % confidence.

    `noise` is the standard error of one pair's log ratio (`noise_floor`). Student's t, solved by iteration from MIN_REPLAYS on.
    """
    pairs = MIN_REPLAYS
    while True:
        needed = (stats.t.ppf(0.975, pairs - 1) + stats.norm.ppf(power)) * noise / math.log1p(effect)
        if needed**2 <= pairs:
            return pairs
        pairs += 1
