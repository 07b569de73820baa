"""The statistics of a gate: Student's t on blocks, spending of error over looks, correction over metrics. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

TINY = 1e-9
"""Standard error of a difference that never varied (greedy tau): equal is equal, and any change is certain."""


LOUDER_P = 0.05


@dataclass(frozen=True, slots=True)
class Noise:
    """Variance of one difference, and the degrees of freedom it is known with."""

    variance: float
    freedom: int

    def joined(self, mean: Mean) -> Noise:
        """With the variance of `mean` pooled in."""
        if mean.sd is None:
            return self
        freedom = self.freedom + mean.freedom
        return Noise((self.variance * self.freedom + mean.sd**2 * mean.freedom) / freedom, freedom)


@dataclass(frozen=True, slots=True)
class Mean:
    """Mean of `n` independent differences, or of what equals so many. `sd`: of one of them, None where too few are known;
    `freedom`: its degrees of freedom."""

    value: float
    sd: float | None
    n: float
    freedom: int

    @property
    def se(self) -> float | None:
        return None if self.sd is None else self.sd / math.sqrt(self.n)

    def steadied(self, known: Noise | None) -> Mean:
        """With what is known of the noise pooled in, unless these differences vary significantly more (F test at 5 %)."""
        if known is None or self.sd is None:
            return self
        own, variance = self.freedom, self.sd**2
        if stats.f.sf(variance / max(known.variance, TINY**2), own, known.freedom) <= LOUDER_P:
            return self
        both = known.joined(self)
        return Mean(self.value, math.sqrt(both.variance), self.n, own + known.freedom)

    def p_above(self, limit: float) -> float:
        """One-sided p-value of "the true mean is at most `limit`"; 1 where it cannot be known."""
        if self.se is None:
            return 1.0
        return float(special.stdtr(self.freedom, -(self.value - limit) / max(self.se, TINY)))

    def p_below(self, limit: float) -> float:
        """One-sided p-value of "the true mean is at least `limit`"."""
        if self.se is None:
            return 1.0
        return float(special.stdtr(self.freedom, (self.value - limit) / max(self.se, TINY)))

    def interval(self, confidence: float = 0.95) -> tuple[float, float] | None:
        if self.se is None:
            return None
        half = float(special.stdtrit(self.freedom, (1 + confidence) / 2)) * self.se
        return self.value - half, self.value + half


def mean_of(values: Sequence[float]) -> Mean:
    n = len(values)
    if n < 2:
        return Mean(float(values[0]) if n else 0.0, None, n, 0)
    array = np.asarray(values, dtype=float)
    return Mean(float(array.mean()), float(array.std(ddof=1)), n, n - 1)


def mean_of_groups(groups: Sequence[Sequence[float]]) -> Mean:
    """Each group counts alike, and `sd` is that within groups: what all of a group share is no noise, and cancels between two."""
    known = [np.asarray(values, dtype=float) for values in groups if len(values)]
    if len(known) < 2:
        return mean_of(known[0].tolist() if known else ())
    total = sum(len(values) for values in known)
    freedom = total - len(known)
    squares = sum(float(((values - values.mean()) ** 2).sum()) for values in known)
    return Mean(
        value=float(np.mean([values.mean() for values in known])),
        sd=math.sqrt(squares / freedom) if freedom else None,
        n=len(known) ** 2 / sum(1 / len(values) for values in known),
        freedom=freedom,
    )


def spent(alpha: float, fraction: float) -> float:
    """Error that may have been used up when `fraction` of the budget is: α·t² (Kim & DeMets 1987, Biometrika 74, power family).

    Looks are at fractions of the budget, not of a planned sample (calendar time: Lan & DeMets 1989, Biometrics 45), so a slow
    server changes the sample and not the error.
    """
    return alpha * min(max(fraction, 0.0), 1.0) ** 2


def level(alpha: float, before: float, now: float) -> float:
    """Level of the test at this look: what may be spent between two looks.

    Summing these levels bounds the error of all looks by Boole's inequality, whatever the dependence between looks. The exact
    joint boundary (Lan & DeMets 1983) is less strict, and needs normal increments that small samples do not have.
    """
    return spent(alpha, now) - spent(alpha, before)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjusted p-values that hold over all metrics together, whatever their dependence (Holm 1979)."""
    adjusted: dict[str, float] = {}
    highest = 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, p * (len(p_values) - rank)))
        adjusted[name] = highest
    return adjusted


def blocks_to_decide(noise: float, change: float, band: float, alpha: float) -> int:
    """Blocks after which an effect of this size is told from the band, nine times out of ten.

    From n = ((z_α + z_0.9) · sd ÷ distance)², the distance being the band for a change near 0 and at least a quarter of it
    for one near the band, where no count would decide.
    """
    distance = max(abs(band - max(change, 0.0)), band / 4)
    z = float(stats.norm.isf(alpha) + stats.norm.isf(0.1))
    return max(2, math.ceil((z * noise / distance) ** 2))


def divergence_p(new: int, own: int) -> float:
    """One-sided p-value of "the candidate differs from the baseline no more often than the baseline from itself".

    Of the requests where exactly one of the two comparisons differs, `new` differ from the candidate and `own` from the baseline's
    second run. With equal sides both are equally likely (McNemar 1947, exact binomial form).
    """
    if new + own == 0:
        return 1.0
    return float(stats.binom.sf(new - 1, new + own, 0.5))
