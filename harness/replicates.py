"""What several runs say together: intervals of an open loop, and comparisons that hold against run-to-run noise.

A server's start and the machine's state move all requests of a run together, which no bootstrap within one run can see. The unit
here is therefore the run (or an interleaved pair of runs), and intervals are Student's t over runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from scipy import stats

from harness.statistics import Estimate

MIN_REPLAYS = 5
Verdict = Literal["better", "worse", "equivalent", "inconclusive"]


def replay_interval(values: Sequence[float]) -> Estimate:
    """One statistic of each of several replays of one trace. Estimand: its mean over replays of this trace on this engine."""
    mean = float(np.mean(values))
    if len(values) < MIN_REPLAYS:
        return Estimate(mean, None, f"{len(values)} replays are too few for an interval in open loop: it needs {MIN_REPLAYS}")
    half = float(stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    return Estimate(mean, (mean - half, mean + half))


def paired_runs(off: Sequence[float], on: Sequence[float]) -> Estimate:
    """Speed-up from interleaved pairs of runs: the geometric mean of off ÷ on of one statistic (E2E p50, ...) of each run.

    Raises:
        ValueError: the runs are not in pairs.
    """
    logs = np.log(np.asarray(off, dtype=float)) - np.log(np.asarray(on, dtype=float))
    found = replay_interval(list(logs))
    ci95 = (math.exp(found.ci95[0]), math.exp(found.ci95[1])) if found.ci95 else None
    return Estimate(math.exp(found.value), ci95, found.note)


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
