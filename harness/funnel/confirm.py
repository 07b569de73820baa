"""Confirmation: finalists and off, measured again in turn on requests that the search has not seen.

In a round each finalist and off are started once and measured at every batch size, so that what drifts hits all alike: load by load in
turn where their servers fit beside each other, else server by server, the order reversed every other time. After each round the funnel
learns its loads, which may make another configuration a finalist. It ends when the best is apart from off or equal to it, when one more
round could not make it so or would cost too much of what all servers would take, or when the rounds are used up. Two finalists that
are nearly equal are not told apart: that takes more rounds than choosing the wrong one costs.

The winner is chosen by all that was measured, in search and confirmation. Its speed-up, and whether it is clear, come from the
confirmation alone: what the search picked for its luck has none of that luck here.

The machine may be slow while one side is measured. It then computes prompts slowly too, which hardly depend on the drafter: a round in
which the sides' TTFT differ from what was predicted, one by more than the other, is not counted where a calmer one is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from backends.types import ServingConfig
from harness.funnel.observation import Observation, Workload
from harness.funnel.search import MAX_FINALISTS, Funnel
from harness.statistics import Estimate

TIE = 0.005
"""Log speed-ups within this are equal: the smaller K wins, then off."""
EQUAL = 0.02
"""Two configurations are equal where the interval of their difference ends within this of 0 on both sides."""
SERVER_SD, PRIOR_REPEATS = 0.008, 4
"""What two starts of one server differ by, relative, before repeats have shown it, and how many repeats that is worth."""
SURPRISE = 0.02
UNEVEN = 0.06
"""Of log measured ÷ predicted TTFT, by how much two sides of a round may differ more than in the calmest round."""


class Paced(NamedTuple):
    """A load of a round, and the log of its measured ÷ predicted TTFT."""

    load: Observation
    pace: float


Rounds = Sequence[Sequence[Paced]]


@dataclass(frozen=True, slots=True)
class Confirmed:
    winner: ServingConfig  # off where nothing is better
    clear: bool  # the winner is apart from all others, or equal to them
    speedups: dict[ServingConfig, Estimate]  # log speed-up over off
    rounds: int


def confirm(
    funnel: Funnel,
    finalists: Sequence[ServingConfig],
    requests: Callable[[int], int],
    *,
    least_weight: float,
    max_rounds: int = 3,
    side_by_side: Callable[[Sequence[ServingConfig], Sequence[int], str], bool] = lambda configs, batches, stage: False,
    after: Callable[[ServingConfig], None] = lambda config: None,
) -> Confirmed:
    """Measure until it is decided, `requests(batch size)` requests a load. Batch sizes of less than `least_weight` in every trace are
    left out.

    A round that contradicts the search, or puts another configuration before its finalists, calls for another. `side_by_side` starts the
    servers of a stage at once, or says that they do not fit. `after` is called once with each server that was measured, while it runs.
    """
    workloads = funnel.workloads
    batches = [b for b in sorted({b for w in workloads for b in w.weights}) if _weight(workloads, b) >= least_weight]
    alive = list(finalists)
    expected: dict[ServingConfig, tuple[float, float]] = {}
    rounds: list[list[Observation]] = []
    seen: set[ServingConfig] = set()
    result = Confirmed(funnel.off, True, {}, 0)

    def look_at(config: ServingConfig) -> None:
        if config not in seen:
            after(config)
            seen.add(config)

    while alive:
        expected = {config: _expected(funnel, config) for config in alive} | expected
        loads: list[Observation] = []
        stage, number = f"confirm{result.rounds + 1}", result.rounds
        sides = _turned([*alive, funnel.off], number)
        in_turn = side_by_side(sides, batches, stage)
        if in_turn:
            turns = [(config, batch) for i, batch in enumerate(batches) for config in _turned(sides, i)]
        else:
            turns = [(config, batch) for config in sides for batch in batches]
        for config, batch in turns:
            found = funnel.measure(config, batch, stage, requests(batch))
            loads += found.values() if found else ()
            if not in_turn and batch == batches[-1]:
                look_at(config)
        if in_turn:  # what is compared lies close together
            for config in sides:
                look_at(config)
        funnel.learn(loads)
        rounds.append(loads)
        result = _judge(funnel, _paced(funnel, rounds), list(expected))
        surprised = any(_surprising(result.speedups[config], *expected[config]) for config in alive)
        leader = max(expected, key=lambda config: _expected(funnel, config)[0])
        best = _expected(funnel, leader)[0]
        rivals = funnel.rivals(leader if best > 0 else funnel.off)
        overtaken = any(config not in expected and _expected(funnel, config)[0] > best + TIE for config in rivals)
        settled = _is_settled(result.speedups[leader], result.rounds) and not surprised and not overtaken
        if settled or result.rounds >= max_rounds or funnel.stop():
            break
        alive = [leader, *(config for config in rivals if config != leader)][:MAX_FINALISTS]
        if not funnel.affords(len(alive) + 1):
            break
    return result


def _turned(sides: Sequence[ServingConfig], number: int) -> Sequence[ServingConfig]:
    return sides if number % 2 == 0 else sides[::-1]


def compare(rounds: Rounds, config: ServingConfig, other: ServingConfig, workloads: Sequence[Workload]) -> Estimate:
    """Log speed-up of `config` over `other`: mean over paired requests of log(E2E of other ÷ E2E of config), weighted by batch
    sizes, with its interval over requests and server starts. NaN where they share no load.

    A request counts once, with its mean over rounds and its part in all batch sizes: what is easy to draft is so at all of them. All
    requests of a load share its steps' noise. What server starts add is the rounds' spread, of which a few rounds say little: it is
    pooled with `SERVER_SD` as an inverse-gamma prior would be. Rounds that the machine disturbed are left out.
    """
    value = total = shared = 0.0
    influence: dict[tuple[str, int], float] = {}  # of each request on the value: its deviation from the mean, weighted
    means: dict[int, float] = {}  # weighted sums of each round
    steady = _steady(rounds, config, other, workloads)
    for workload in workloads:
        for batch, weight in workload.weights.items():
            sides = {i: both for i in steady if (both := _sides(rounds[i], config, other, batch, workload))}
            pairs = {i: found for i, (on, off) in sides.items() if (found := _paired(on.load, off.load))}
            gains = _by_request(pairs.values())
            if len(gains) < 2:
                continue
            mean = float(np.mean(list(gains.values())))
            value += weight * mean
            total += weight
            shared += weight**2 * sum(side.load.step_noise for i in pairs for side in sides[i]) / len(pairs) ** 2
            for request, gain in gains.items():
                at = workload.name, request
                influence[at] = influence.get(at, 0.0) + weight * (gain - mean) / (len(gains) - 1)
            for i, found in pairs.items():
                means[i] = means.get(i, 0.0) + weight * float(np.mean(list(found.values())))
    if not total:
        return Estimate(math.nan)
    variance = shared + sum(part**2 for part in influence.values())
    each = np.array(list(means.values())) / total
    spread = PRIOR_REPEATS * 2 * SERVER_SD**2 + float(((each - each.mean()) ** 2).sum())
    servers = spread / (PRIOR_REPEATS + len(each) - 1) / len(each)
    half = 1.96 * math.sqrt(variance / total**2 + servers)
    return Estimate(value / total, (value / total - half, value / total + half))


def _sides(
    loads: Sequence[Paced], config: ServingConfig, other: ServingConfig, batch: int, workload: Workload
) -> tuple[Paced, Paced] | None:
    """A round's loads of both at one batch size; None where one is missing."""
    here = {p.load.config: p for p in loads if (p.load.batch_size, p.load.workload) == (batch, workload.name)}
    return (here[config], here[other]) if config in here and other in here else None


def _unevenness(rounds: Rounds, config: ServingConfig, other: ServingConfig, workloads: Sequence[Workload]) -> dict[int, float]:
    """By round how much more than predicted the prompts of `config` took than those of `other`, in log, weighted by batch sizes."""
    found: dict[int, float] = {}
    for i, loads in enumerate(rounds):
        sides = [(weight, _sides(loads, config, other, batch, w)) for w in workloads for batch, weight in w.weights.items()]
        paces = [(weight, pair[0].pace - pair[1].pace) for weight, pair in sides if pair and weight > 0]
        if paces:
            found[i] = sum(weight * pace for weight, pace in paces) / sum(weight for weight, _ in paces)
    return found


def _steady(rounds: Rounds, config: ServingConfig, other: ServingConfig, workloads: Sequence[Workload]) -> list[int]:
    """Rounds that are about as even as the most even one."""
    uneven = _unevenness(rounds, config, other, workloads)
    calm = min(uneven.values(), key=abs, default=0.0)
    return [i for i, value in uneven.items() if abs(value - calm) <= UNEVEN]


def _paced(funnel: Funnel, rounds: Sequence[Sequence[Observation]]) -> Rounds:
    """The rounds' loads, the last that the funnel has learned, with how its present fit predicts their prompts."""
    paces = iter([math.log(ttft) for _, ttft in funnel.ratios[-sum(map(len, rounds)) :]])
    return [[Paced(load, next(paces)) for load in loads] for loads in rounds]


def _judge(funnel: Funnel, rounds: Rounds, configs: Sequence[ServingConfig]) -> Confirmed:
    """Of those within `TIE` of the best the smallest K wins, off where that gains no more than `TIE`."""
    speedups = {config: compare(rounds, config, funnel.off, funnel.workloads) for config in configs}
    gains = {c: _expected(funnel, c)[0] for c in configs if not math.isnan(speedups[c].value)}
    if not gains:  # nothing could be measured
        return Confirmed(funnel.off, False, speedups, len(rounds))
    near = [config for config, gain in gains.items() if gain >= max(gains.values()) - TIE]
    best = min(near, key=lambda config: config.k)
    others = [speedups[best], *(compare(rounds, best, config, funnel.workloads) for config in gains if config != best)]
    clear = all(_apart(found) or _equal(found) for found in others)
    return Confirmed(best if gains[best] > TIE else funnel.off, clear, speedups, len(rounds))


def _expected(funnel: Funnel, config: ServingConfig) -> tuple[float, float]:
    """Log speed-up by all loads and its standard deviation."""
    return funnel.scores.of(config) if config in funnel.scores.configs else (0.0, math.inf)


def _surprising(found: Estimate, mean: float, sd: float) -> bool:
    """Search and confirmation disagree by more than both allow for: the machine was not the same."""
    if found.ci95 is None:
        return False
    half = (found.ci95[1] - found.ci95[0]) / 2
    return abs(found.value - mean) > SURPRISE + half + 1.96 * sd


def _is_settled(found: Estimate, rounds: int) -> bool:
    """Apart from off or equal to it, or neither after one more round either, should that find the same."""
    if found.ci95 is None:
        return False
    half = (found.ci95[1] - found.ci95[0]) / 2 * math.sqrt(rounds / (rounds + 1))
    after = Estimate(found.value, (found.value - half, found.value + half))
    return _apart(found) or _equal(found) or not (_apart(after) or _equal(after))


def _apart(found: Estimate) -> bool:
    return found.ci95 is not None and (found.ci95[0] > 0 or found.ci95[1] < 0)


def _equal(found: Estimate) -> bool:
    return found.ci95 is not None and found.ci95[0] > -EQUAL and found.ci95[1] < EQUAL


def _weight(workloads: Sequence[Workload], batch: int) -> float:
    return max(w.weights.get(batch, 0.0) for w in workloads)


def _paired(on: Observation, off: Observation) -> dict[int, float]:
    """Log speed-up by request, of those that both served."""
    places = {request: i for i, request in enumerate(off.requests)}
    return {r: math.log(off.e2e_s[places[r]] / on.e2e_s[i]) for i, r in enumerate(on.requests) if r in places}


def _by_request(pairs: Iterable[dict[int, float]]) -> dict[int, float]:
    """Each request's mean over the rounds that measured it."""
    found: dict[int, list[float]] = {}
    for gains in pairs:
        for request, gain in gains.items():
            found.setdefault(request, []).append(gain)
    return {request: float(np.mean(values)) for request, values in found.items()}
