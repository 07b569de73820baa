"""How much one replica serves within the SLO, how many a trace needs, and what that costs. Pure functions.

A closed loop with `n` requests in flight completes so many a second, and each took so long. An open loop at the same mean rate also
queues by chance, so its tail is worse: closed loops predict the ceiling, and open-loop replays at rates around it bracket it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

TIME_SCALES = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Arrival times are multiplied by these: 0.5 is twice the trace's load."""

MINUTE_S = 60.0

REPLAYS = 4
"""Open-loop replays of one server at most: each takes as long as the requests take to arrive."""
STEP, CLOSE = 1.5, 1.15
"""Rates are tried this factor apart until one passes and one fails; then the gap is halved until it is this small."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measured closed loop. `latencies_s` by name of the SLO: ttft_p95, tpot_p50, ..."""

    concurrency: int
    requests_per_s: float
    tokens_per_s: float
    latencies_s: Mapping[str, float | None]

    def broken(self, slo: Mapping[str, float]) -> list[str]:
        """Limits that it does not meet; one whose latency is not known is not met."""
        return [name for name, limit in slo.items() if (value := self.latencies_s.get(name)) is None or value > limit]


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The highest request rate of one replica within the SLO, between what was measured to pass and to fail."""

    passing_rps: float | None  # None: not even the smallest measured concurrency passes
    passing_concurrency: int | None
    passing_tokens_per_s: float | None
    failing_rps: float | None  # None: everything measured passes, so the ceiling is at least `passing_rps`
    failing_concurrency: int | None
    limited_by: str | None  # the limit that fails first
    between_rps: float | None  # rate at which that limit is reached, interpolated between the two; None without both

    @property
    def predicted_rps(self) -> float | None:
        """Where an open loop is first tried: a prediction, since closed loops have no queue."""
        if self.between_rps or self.passing_rps:
            return self.between_rps or self.passing_rps
        return self.failing_rps / STEP if self.failing_rps else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def ceiling(points: Sequence[Point], slo: Mapping[str, float]) -> Ceiling:
    """The ceiling from closed loops in ascending concurrency. Without limits it is the highest rate measured."""
    ordered = sorted(points, key=lambda p: p.concurrency)
    failing = next((p for p in ordered if p.broken(slo)), None)
    passing = [p for p in ordered if failing is None or p.concurrency < failing.concurrency]
    best = max(passing, key=lambda p: p.requests_per_s, default=None)
    limit = failing.broken(slo)[0] if failing else None
    between = None
    if passing and failing and limit:
        between = _rate_at(passing[-1], failing, limit, slo[limit])
    return Ceiling(
        passing_rps=best.requests_per_s if best else None,
        passing_concurrency=best.concurrency if best else None,
        passing_tokens_per_s=best.tokens_per_s if best else None,
        failing_rps=failing.requests_per_s if failing else None,
        failing_concurrency=failing.concurrency if failing else None,
        limited_by=limit,
        between_rps=between,
    )


def _rate_at(low: Point, high: Point, name: str, limit_s: float) -> float | None:
    """The rate where one latency reaches its limit, both linear between two measured loops."""
    a, b = low.latencies_s.get(name), high.latencies_s.get(name)
    if a is None or b is None or b <= a:
        return None
    share = (limit_s - a) / (b - a)
    return low.requests_per_s + share * (high.requests_per_s - low.requests_per_s)


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """One replay of the trace's arrivals, sped up or slowed down to this mean rate."""

    requests_per_s: float
    broken: tuple[str, ...]  # limits that it did not meet
    trial: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def bracket(replays: Sequence[OpenLoop]) -> tuple[OpenLoop | None, OpenLoop | None]:
    """The slowest replay that failed and the fastest that passed below it; a pass above a failure is chance and does not count."""
    failing = min((r for r in replays if r.broken), key=lambda r: r.requests_per_s, default=None)
    below = [r for r in replays if not r.broken and (failing is None or r.requests_per_s < failing.requests_per_s)]
    return max(below, key=lambda r: r.requests_per_s, default=None), failing


def next_rate(replays: Sequence[OpenLoop], predicted_rps: float) -> float | None:
    """The rate to try next; None where one that passed and one that failed are close enough."""
    passing, failing = bracket(replays)
    if passing is None or failing is None:
        known = passing or failing
        if known is None:
            return predicted_rps
        step = STEP if failing is None else 1 / STEP
        beyond = math.log(predicted_rps / known.requests_per_s) / math.log(step)  # in steps towards what is still missing
        return predicted_rps if beyond > 0.1 else known.requests_per_s * step
    low, high = passing.requests_per_s, failing.requests_per_s
    if high <= low * CLOSE:
        return None
    middle = math.sqrt(low * high)  # of a wide gap only the end where the ceiling is expected is looked at
    return max(middle, high / STEP) if predicted_rps >= middle else min(middle, low * STEP)


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests per second that a trace asks for: over its span, in its 95th-percentile minute and in its busiest one."""

    mean_rps: float
    p95_minute_rps: float
    peak_minute_rps: float
    minutes: float  # length of the trace; under 1 the three are one rate

    def at(self, time_scale: float) -> Demand:
        return Demand(
            self.mean_rps / time_scale,
            self.p95_minute_rps / time_scale,
            self.peak_minute_rps / time_scale,
            self.minutes * time_scale,
        )


def demand(arrivals_s: NDArray[np.float64]) -> Demand | None:
    """Demand of a trace's arrivals [n] in seconds. Minutes begin at every arrival, so that no busy one is cut in two."""
    times = np.sort(arrivals_s[~np.isnan(arrivals_s)])
    if len(times) < 2 or times[-1] <= times[0]:
        return None
    span = float(times[-1] - times[0])
    mean = (len(times) - 1) / span
    if span < MINUTE_S:
        return Demand(mean, mean, mean, span / MINUTE_S)
    begins = times[times <= times[-1] - MINUTE_S]
    counts = np.searchsorted(times, begins + MINUTE_S, side="left") - np.searchsorted(times, begins, side="left")
    p95, peak = np.quantile(counts, 0.95), counts.max()
    return Demand(mean, float(p95) / MINUTE_S, float(peak) / MINUTE_S, span / MINUTE_S)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas for one demand. `headroom` is what the busiest minute leaves unused."""

    time_scale: float
    p95_minute_rps: float
    peak_minute_rps: float
    replicas_p95: int | None
    replicas_peak: int | None
    headroom: float | None
    usd_per_hour: float | None  # of the replicas for the busiest minute

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def fleet(needed: Demand, rps: float | None, *, usd_per_replica_hour: float | None) -> list[Fleet]:
    """Replicas of `rps` each for the trace at each time scale."""
    rows = []
    for scale in TIME_SCALES:
        at = needed.at(scale)
        p95, peak = (_replicas(rate, rps) for rate in (at.p95_minute_rps, at.peak_minute_rps))
        rows.append(
            Fleet(
                time_scale=scale,
                p95_minute_rps=at.p95_minute_rps,
                peak_minute_rps=at.peak_minute_rps,
                replicas_p95=p95,
                replicas_peak=peak,
                headroom=1 - at.peak_minute_rps / (peak * rps) if peak and rps else None,
                usd_per_hour=peak * usd_per_replica_hour if peak and usd_per_replica_hour is not None else None,
            )
        )
    return rows


def _replicas(rate: float, rps: float | None) -> int | None:
    return math.ceil(rate / rps - 1e-9) if rps else None


def usd_per_million_tokens(tokens_per_s: float | None, usd_per_replica_hour: float | None) -> float | None:
    """Price of a million output tokens from a replica that is busy all the time."""
    if not tokens_per_s or usd_per_replica_hour is None:
        return None
    return usd_per_replica_hour / 3600 / tokens_per_s * 1e6


def is_saturated(points: Sequence[Point]) -> bool:
    """Whether more requests in flight hardly raised the rate any more at the largest two measured: the ceiling is in sight."""
    rates = [p.requests_per_s for p in sorted(points, key=lambda p: p.concurrency)]
    return any(after < before * 1.05 for before, after in pairwise(rates))
