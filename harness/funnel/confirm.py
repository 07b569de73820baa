"""Confirmation: finalists and off, measured again in turn on requests that the search has not seen.

Rounds are server lifetimes: each finalist and off once per round, the order reversed every other round, so that what drifts hits all
alike. It ends when the best is apart from off and from the other finalists, or equal to them within `TIE`, or the rounds are used up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from backends.types import ServingConfig
from harness.funnel.observation import Measure, Observation, Workload
from harness.statistics import Estimate

TIE = 0.01
"""Log speed-ups within this are equal: the smaller K wins, then off."""
SERVER_SD = 0.008
"""What two starts of one server differ by, relative; joined to every interval, since one round cannot show it."""


SURPRISE = 0.02


@dataclass(frozen=True, slots=True)
class Confirmed:
    winner: ServingConfig  # off where nothing is better
    clear: bool  # the winner is apart from all others, or equal to them within `TIE`
    speedups: dict[ServingConfig, Estimate]  # log speed-up over off
    rounds: int


def confirm(
    expected: Mapping[ServingConfig, tuple[float, float]],
    off: ServingConfig,
    workloads: Sequence[Workload],
    measure: Measure,
    requests: Callable[[int], int],
    *,
    least_weight: float,
    max_rounds: int = 3,
    after: Callable[[ServingConfig, int], None] = lambda config, rounds: None,
    stop: Callable[[], bool] = lambda: False,
) -> Confirmed:
    """Measure until it is decided. Batch sizes of less than `least_weight` in every trace are left out.

    `expected` holds the finalists with the search's log speed-up and its standard deviation; a round that contradicts it calls for
    another. `after` is called with each server that was measured, while it runs, and the number of rounds before.
    """
    finalists = list(expected)
    batches = [b for b in sorted({b for w in workloads for b in w.weights}) if _weight(workloads, b) >= least_weight]
    alive: list[ServingConfig] = list(finalists)
    loads: list[Observation] = []
    rounds = 0
    while alive:
        order = [*alive, off] if rounds % 2 == 0 else [off, *reversed(alive)]
        for config in order:
            for batch in batches:
                found = measure(config, batch, f"confirm{rounds + 1}", requests(batch))
                loads += found.values() if found else ()
            after(config, rounds)
        rounds += 1
        against_off = {config: compare(loads, config, off, workloads) for config in finalists}
        best = max(alive, key=lambda config: against_off[config].value)
        against_best = {config: compare(loads, best, config, workloads) for config in finalists if config != best}
        result = _judge(off, best, against_off, against_best, rounds)
        surprised = any(_surprising(against_off[config], *expected[config]) for config in alive)
        if (result.clear and not surprised) or rounds >= max_rounds or stop():
            return result
        alive = [config for config in alive if config == best or not _apart(against_best[config])]
    return Confirmed(off, True, {}, 0)


def compare(
    loads: Sequence[Observation], config: ServingConfig, other: ServingConfig, workloads: Sequence[Workload]
) -> Estimate:
    """Log speed-up of `config` over `other`: mean over paired requests of log(E2E of other ÷ E2E of config), weighted by batch
    sizes, with its interval over requests and server starts. NaN where they share no load."""
    value = variance = total = 0.0
    rounds = 1
    for workload in workloads:
        for batch, weight in workload.weights.items():
            pairs = [
                _paired(a, b)
                for a, b in zip(_of(loads, config, batch, workload), _of(loads, other, batch, workload), strict=False)
            ]
            pairs = [p for p in pairs if len(p)]
            if not pairs:
                continue
            rounds = max(rounds, len(pairs))
            gains = np.concatenate(pairs)
            value += weight * float(gains.mean())
            variance += weight**2 * float(gains.var(ddof=1)) / len(gains) if len(gains) > 1 else weight**2
            total += weight
    if not total:
        return Estimate(math.nan)
    half = 1.96 * math.sqrt(variance / total**2 + 2 * SERVER_SD**2 / rounds)
    return Estimate(value / total, (value / total - half, value / total + half))


def _judge(
    off: ServingConfig,
    best: ServingConfig,
    against_off: Mapping[ServingConfig, Estimate],
    against_best: Mapping[ServingConfig, Estimate],
    rounds: int,
) -> Confirmed:
    """`best` has the best speed-up; of those within `TIE` of it the smallest K wins, and off where that is not above 1."""
    near = [config for config, found in against_off.items() if found.value >= against_off[best].value - TIE]
    if not near:  # nothing could be measured
        return Confirmed(off, False, dict(against_off), rounds)
    winner = min(near, key=lambda config: config.k)
    clear = all(_apart(found) or _equal(found) for found in [against_off[winner], *against_best.values()])
    ci95 = against_off[winner].ci95
    return Confirmed(winner if ci95 and ci95[0] > 0 else off, clear, dict(against_off), rounds)


def _surprising(found: Estimate, mean: float, sd: float) -> bool:
    """Search and confirmation disagree by more than both allow for: the machine was not the same."""
    if found.ci95 is None:
        return False
    half = (found.ci95[1] - found.ci95[0]) / 2
    return abs(found.value - mean) > SURPRISE + half + 1.96 * sd


def _apart(found: Estimate) -> bool:
    return found.ci95 is not None and (found.ci95[0] > 0 or found.ci95[1] < 0)


def _equal(found: Estimate) -> bool:
    return found.ci95 is not None and found.ci95[0] > -2 * TIE and found.ci95[1] < 2 * TIE


def _weight(workloads: Sequence[Workload], batch: int) -> float:
    return max(w.weights.get(batch, 0.0) for w in workloads)


def _of(loads: Sequence[Observation], config: ServingConfig, batch: int, workload: Workload) -> list[Observation]:
    return [o for o in loads if (o.config, o.batch_size, o.workload) == (config, batch, workload.name)]


def _paired(on: Observation, off: Observation) -> np.ndarray:
    places = {request: i for i, request in enumerate(off.requests)}
    rows = [(i, places[r]) for i, r in enumerate(on.requests) if r in places]
    return np.array([math.log(off.e2e_s[j] / on.e2e_s[i]) for i, j in rows])
