"""Acceptance of a drafter at every K from loads at a few K. Acceptance depends on the text, not on the batch size: all loads of a
drafter are pooled.

A chain drafter's first positions do not know how many follow: position rates m_i of a load at K_max give τ(K) = 1 + Σ_{i≤K} m_i.
That is nearly exact for drafters that are models. But steps of a smaller K begin at other places in the text: a stretch that is easy to
draft is cut into more steps, so τ(K) is larger than the rates of K_max say, for n-gram by a tenth. Measured and recorded texts follow

    log τ(K) = log(1 + Σ_{i≤K} m_i) + stretch · log τ(K_max) · (1 − K ÷ K_max)

with a stretch that depends on the drafter and the text; loads at several K show it, and before that it is taken to be what others had
(`LOOKUP_STRETCH`, `MODEL_STRETCH`). Trees and parallel drafters draft differently for each K: their rates hold at the K that was
measured, and elsewhere only within `PARALLEL_SD`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from backends.types import ServingConfig
from harness.funnel.observation import Observation
from harness.offline import Acceptance
from harness.statistics import Estimate

PARALLEL_VARIANTS = frozenset({"p_eagle", "dflash", "dspark"})
PARALLEL_SD = 0.03
"""Relative uncertainty of τ when K is doubled or halved from the one measured, for drafters whose draft depends on K."""
LOOKUPS = frozenset({"ngram", "suffix"})
LOOKUP_STRETCH, MODEL_STRETCH = (0.27, 0.08), (0.03, 0.02)
"""Mean and standard deviation of the stretch: of lookups and of other drafters. n-gram on six kinds of text that SmolLM2-135M answered
or people wrote: 0.18 to 0.35; its EAGLE-3 head 0.05, a quantized copy 0.02."""

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
    gap: float  # |τ(K_small) measured − as the curve says|, 0 where not checked
    drafted_share: float
    stretch: float = 0.0
    stretch_sd: float = 0.0

    def tau(self, k: int) -> Estimate:
        """τ at K with its 95 % interval (delta method on the ratio accepted ÷ steps, joined with stretch and gap).

        Raises:
            ValueError: no load had that many positions.
        """
        if k > len(self.rates):
            raise ValueError(f"position rates are known up to {len(self.rates)}, not {k}")
        reach = math.log1p(math.fsum(self.rates)) * (1 - k / len(self.rates))
        value = min((1.0 + math.fsum(self.rates[:k])) * math.exp(self.stretch * reach), k + 1.0)
        variance = self.inflation * _variance(self.rates[:k]) / self.steps[k - 1] + (self.stretch_sd * reach * value) ** 2
        half = 1.96 * math.sqrt(variance) + self.gap
        return Estimate(value, (max(1.0, value - half), min(k + 1.0, value + half)))

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
    """The curve of one drafter on one workload from all its loads, pooled by decode steps as if all had the largest K."""
    inflation = _inflation(loads)
    deepest = max(load.config.k for load in loads)
    reach = math.log(_tau([load for load in loads if load.config.k == deepest]))
    stretch, stretch_sd, gap = _stretch(loads, reach / deepest, inflation)
    scales = [_as_deepest(load.tau, stretch * reach * (1 - load.config.k / deepest)) for load in loads]
    steps, rates = [], []
    for i in range(deepest):
        here = [(load.decode_steps, _rate(load, i) * by) for load, by in zip(loads, scales, strict=True) if load.config.k > i]
        steps.append(sum(count for count, _ in here))
        rates.append(sum(count * rate for count, rate in here) / steps[i])
    rates = list(np.minimum.accumulate(rates))  # marginal rates never rise; pooling over different K may say otherwise
    share = sum(load.drafted_share * load.decode_steps for load in loads) / sum(load.decode_steps for load in loads)
    return Curve(tuple(rates), tuple(steps), inflation, gap, share, stretch, stretch_sd)


class _Stretch(NamedTuple):
    """Posterior mean, at least 0, and standard deviation; and by how much τ of the smallest K differs beyond its noise."""

    mean: float
    sd: float
    gap: float


def _stretch(loads: Sequence[Observation], per_position: float, inflation: float) -> _Stretch:
    """Each measured K against the larger ones is a reading of it. `per_position`: of log τ, where the stretch is 1."""
    prior, sd = LOOKUP_STRETCH if loads[0].config.variant in LOOKUPS else MODEL_STRETCH
    precision, weighted = 1 / sd**2, prior / sd**2
    ks = sorted({load.config.k for load in loads})
    readings = []
    for k in ks[:-1]:
        own, deep = [load for load in loads if load.config.k == k], [load for load in loads if load.config.k > k]
        counts = np.array([load.decode_steps for load in deep])
        rates = np.average([[_rate(load, i) for i in range(k)] for load in deep], axis=0, weights=counts).tolist()
        expected = 1.0 + math.fsum(rates)
        excess = math.log(_tau(own) / expected)
        slope = per_position * (float(np.average([load.config.k for load in deep], weights=counts)) - k)
        steps = float(1 / counts.sum() + 1 / sum(load.decode_steps for load in own))
        variance = max(_variance(rates) / expected**2 * steps, 1e-9)
        precision += slope**2 / (inflation * variance)
        weighted += slope * excess / (inflation * variance)
        readings.append((excess, slope, variance, _tau(own)))
    mean = max(weighted / precision, 0.0)
    gap = 0.0
    if readings:
        excess, slope, variance, tau = readings[0]
        gap = max(0.0, abs(excess - mean * slope) - 1.96 * math.sqrt(variance)) * tau
    return _Stretch(mean, 1 / math.sqrt(precision), gap)


def _tau(loads: Sequence[Observation]) -> float:
    """Tokens by steps."""
    steps = sum(load.decode_steps for load in loads)
    return sum(load.tau * load.decode_steps for load in loads) / steps


def _as_deepest(tau: float, excess: float) -> float:
    """What rates whose sum is `tau` − 1 are to be multiplied by to lose `excess` of log τ."""
    return max(tau * math.exp(-excess) - 1, 0.0) / (tau - 1) if tau > 1 else 1.0


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
