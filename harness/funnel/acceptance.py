"""Acceptance of a drafter at every K from loads at a few K. Acceptance depends on the text, not on the batch size: all loads of a
drafter are pooled.

A chain drafter's first positions do not know how many follow: position rates m_i of a load at K_max give τ(K) = 1 + Σ_{i≤K} m_i.
That is nearly exact: steps of a smaller K begin at other places in the text, more often within a stretch that is easy to draft, and
gain some per cent. So a K with loads of its own has their τ, as far as they are sure of it, and the K beside it a part of the
difference. Trees and parallel drafters draft differently for each K: their rates hold at the K that was measured, and elsewhere only
within `PARALLEL_SD`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from backends.types import ServingConfig
from harness.funnel.observation import Observation
from harness.offline import Acceptance
from harness.statistics import Estimate

PARALLEL_VARIANTS = frozenset({"p_eagle", "dflash", "dspark"})
PARALLEL_SD = 0.03
"""Relative uncertainty of τ when K is doubled or halved from the one measured, for drafters whose draft depends on K."""
BEGIN_SD = 0.03
"""Relative difference between τ at one K and what position rates of other K say."""

DraftKey = tuple[str, str | None, str, int, int | None]


def draft_key(config: ServingConfig) -> DraftKey:
    """Configurations of one group with equal keys share a drafter, whatever their K."""
    return config.variant, config.draft, config.draft_quantization, config.topk, config.num_draft_tokens


def is_chain(config: ServingConfig) -> bool:
    return config.topk == 1 and config.variant not in PARALLEL_VARIANTS


@dataclass(frozen=True, slots=True)
class Curve:
    """Marginal position rates of one drafter on one workload, and how sure they are."""

    rates: tuple[float, ...]
    steps: tuple[float, ...]  # decode steps behind each rate; inf: exact
    inflation: float  # variance of accepted tokens over requests ÷ that of independent steps
    gap: float  # |τ(K_small) measured − as the rates say|, 0 where not checked
    drafted_share: float
    shifts: Mapping[int, float] = field(default_factory=dict)  # by K with loads of its own: log(their τ ÷ as the rates say)

    def tau(self, k: int) -> Estimate:
        """τ at K with its 95 % interval (delta method on the ratio accepted ÷ steps, joined with the gap).

        Raises:
            ValueError: no load had that many positions.
        """
        if k > len(self.rates):
            raise ValueError(f"position rates are known up to {len(self.rates)}, not {k}")
        value = max(1.0, (1.0 + math.fsum(self.rates[:k])) * math.exp(self._shift(k)))
        half = 1.96 * math.sqrt(self.inflation * _variance(self.rates[:k]) / self.steps[k - 1])
        half += 0.0 if k in self.shifts else self.gap
        return Estimate(value, (max(1.0, value - half), min(k + 1.0, value + half)))

    def _shift(self, k: int) -> float:
        """Between those of the K that were measured; none at K = 0."""
        ks = sorted(self.shifts)
        return float(np.interp(k, [0, *ks], [0.0, *(self.shifts[i] for i in ks)]))

    def rates_at(self, k: int) -> tuple[float, ...]:
        """Marginal rates of the first `k` positions that never rise and add up to τ(K) − 1, as far as rates of 1 allow."""
        rates = np.minimum.accumulate(np.clip(self.rates[:k], 1e-9, 1.0))
        return tuple(np.minimum(rates * (self.tau(k).value - 1) / rates.sum(), 1.0).tolist())

    def rate(self, position: int) -> Estimate:
        """m_i with its interval, positions from 1."""
        rate = self.rates[position - 1]
        half = 1.96 * math.sqrt(self.inflation * rate * (1 - rate) / self.steps[position - 1])
        return Estimate(rate, (max(0.0, rate - half), min(1.0, rate + half)))


class Acceptances(Protocol):
    """Looks up τ(K) of a configuration on a workload."""

    def __call__(self, config: ServingConfig, workload: str) -> Curve | None: ...


def _variance(rates: Sequence[float]) -> float:
    """Variance of the tokens accepted in one step: P(A ≥ i) = m_i, so E[A²] = Σ (2i − 1) m_i."""
    mean = math.fsum(rates)
    return max(0.0, math.fsum((2 * i + 1) * rate for i, rate in enumerate(rates)) - mean**2)


def from_loads(loads: Sequence[Observation]) -> Curve:
    """The curve of one drafter on one workload from all its loads, pooled by decode steps."""
    ks = sorted({load.config.k for load in loads})
    deepest = ks[-1]
    steps = [sum(load.decode_steps for load in loads if load.config.k > i) for i in range(deepest)]
    rates = [sum(_rate(load, i) * load.decode_steps for load in loads if load.config.k > i) / steps[i] for i in range(deepest)]
    rates = list(np.minimum.accumulate(rates))  # marginal rates never rise; pooling over different K may say otherwise
    smallest = min(loads, key=lambda load: load.config.k)
    gap = 0.0
    if smallest.config.k < deepest:
        deep = [load for load in loads if load.config.k > smallest.config.k]
        others = sum(load.decode_steps for load in deep)
        expected = sum(sum(load.position_rates[: smallest.config.k]) * load.decode_steps for load in deep) / others
        noise = math.sqrt(_variance(rates[: smallest.config.k]) * (1 / others + 1 / smallest.decode_steps))
        gap = max(0.0, abs(smallest.tau - 1.0 - expected) - 1.96 * noise)
    share = sum(load.drafted_share * load.decode_steps for load in loads) / sum(load.decode_steps for load in loads)
    inflation = _inflation(loads)
    shifts = {k: _shift_of([load for load in loads if load.config.k == k], rates, inflation) for k in ks} if len(ks) > 1 else {}
    return Curve(tuple(rates), tuple(steps), inflation, gap, share, shifts)


def _shift_of(loads: Sequence[Observation], rates: Sequence[float], inflation: float) -> float:
    """What loads of one K say beyond the pooled rates, shrunk by their own uncertainty."""
    k = loads[0].config.k
    steps = sum(load.decode_steps for load in loads)
    tau = sum(load.tau * load.decode_steps for load in loads) / steps
    variance = inflation * _variance(rates[:k]) / steps / tau**2
    return math.log(tau / (1.0 + math.fsum(rates[:k]))) * BEGIN_SD**2 / (BEGIN_SD**2 + variance)


def from_recorded(parts: Sequence[Acceptance]) -> Curve:
    """The curve of an n-gram or suffix drafter, exact for every K, from `harness.offline` (pooled: one part for each K)."""
    by_k = {part.k: part for part in parts if part.tau is not None}
    taus = [1.0, *(by_k[k].tau or 1.0 for k in sorted(by_k))]
    rates = np.diff(taus)  # may rise with the position: steps of another K begin at other places
    deepest = by_k[max(by_k)]
    return Curve(tuple(rates.tolist()), (math.inf,) * len(rates), 1.0, 0.0, deepest.drafted_steps / max(deepest.steps, 1))


def _rate(load: Observation, position: int) -> float:
    """A position's rate; where the engine counts no positions, τ − 1 shared out geometrically."""
    if position < len(load.position_rates):
        return load.position_rates[position]
    return geometric_rates(load.tau, load.config.k)[position]


def geometric_rates(tau: float, k: int) -> tuple[float, ...]:
    """The marginal rates a, a², ... a^K whose sum is τ − 1."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(1, k + 1)) < tau - 1 else (low, middle)
    return tuple(low**i for i in range(1, k + 1))


def _inflation(loads: Sequence[Observation]) -> float:
    """How much more tokens per step vary between requests than independent steps would; from time per token at equal load.

    Requests differ in luck (code is easier than chat), so their steps are not independent draws.
    """
    found = []
    for load in loads:
        tokens = load.output_tokens - 1
        long = (tokens > 8) & (load.e2e_s > load.ttft_s)  # all tokens in one chunk say nothing of the time between
        if long.sum() < 4:
            continue
        per_token = (load.e2e_s - load.ttft_s)[long] / tokens[long]
        spread = float(np.var(np.log(per_token), ddof=1))
        independent = _variance(load.position_rates) / load.tau**2 * float(np.mean(load.tau / tokens[long]))
        if independent > 0:
            found.append(spread / independent)
    return float(np.clip(np.median(found), 1.0, 50.0)) if found else 4.0
