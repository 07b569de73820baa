"""What the target accepts: how many draft tokens in each decode step of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

from backends.simulated.world import DEFAULT_CATEGORY, Draft

BLOCK = 1 << 16
_LUCK, _WEIGHTS = np.polynomial.hermite_e.hermegauss(21)


@dataclass(frozen=True, slots=True)
class Steps:
    """The decode steps of one request. `accepted[j]` draft tokens were accepted in step j: it emits one more than that, except
    that the last step's tokens beyond the request's end are dropped."""

    accepted: npt.NDArray[np.uint8] | None  # None: nothing is ever drafted, one token a step
    count: int
    has_draft: npt.NDArray[np.bool_] | None = None  # None: every step, if any

    @property
    def drafted(self) -> int:
        """Steps that had a draft."""
        if self.accepted is None:
            return 0
        return self.count if self.has_draft is None else int(self.has_draft.sum())

    def emitted(self, tokens: int) -> list[int]:
        """Tokens of each step, for a request that emits `tokens` of them in decode steps."""
        if self.accepted is None:
            return [1] * self.count
        per_step = (self.accepted.astype(int) + 1).tolist()
        if per_step:
            per_step[-1] -= sum(per_step) - tokens
        return per_step


class Acceptance:
    """Draws the steps of one request after the other from one stream, so equal seeds and equal requests give equal draws."""

    def __init__(self, draft: Draft | None, k: int, seed: int) -> None:
        self._draft, self._k = draft, k
        self._rng = np.random.default_rng([seed, 1])
        self._scores = np.empty(0)
        self._next = 0
        if draft is not None:
            self._thresholds = {name: np.sort(ndtri(np.array(draft.rates(k, name)))) for name in draft.position_rates}
            self._draft_threshold = ndtri(draft.draft_rate)
            self._own, self._shared = np.sqrt(1.0 - draft.dispersion), np.sqrt(draft.dispersion)

    def steps(self, tokens: int, category: str | None) -> Steps:
        """Steps that emit `tokens` tokens (those after a request's first)."""
        if self._draft is None or tokens == 0:
            return Steps(None, tokens)
        if self._next + tokens + 1 > len(self._scores):
            fresh = self._rng.standard_normal(max(BLOCK, tokens + 1))
            self._scores = np.concatenate([self._scores[self._next :], fresh])
            self._next = 0
        scores = self._scores[self._next : self._next + tokens + 1]
        scores = self._shared * scores[0] + self._own * scores[1:]  # the first is the request's share of luck
        thresholds = self._thresholds.get(category or DEFAULT_CATEGORY)
        if thresholds is None:
            thresholds = self._thresholds[DEFAULT_CATEGORY]
        # Position i is accepted where the score is under its threshold; thresholds fall with i.
        accepted = (self._k - np.searchsorted(thresholds, scores, side="right")).astype(np.uint8)
        count = int(np.searchsorted(np.cumsum(accepted, dtype=np.int64) + np.arange(1, tokens + 1), tokens)) + 1
        self._next += count + 1
        has_draft = None if self._draft.draft_rate == 1.0 else scores[:count] < self._draft_threshold
        return Steps(accepted[:count], count, has_draft)


class ExpectedAcceptance:
    """No luck: every request takes the number of steps that is expected of it, and which draft tokens are accepted is not told."""

    def __init__(self, draft: Draft | None, k: int) -> None:
        rates = {name: draft.rates(k, name) for name in draft.position_rates} if draft else {DEFAULT_CATEGORY: ()}
        dispersion = draft.dispersion if draft else 0.0
        self._steps_per_token = {name: expected_steps_per_token(found, dispersion) for name, found in rates.items()}

    def steps(self, tokens: int, category: str | None) -> Steps:
        """Steps that emit `tokens` tokens, at least one if there are any."""
        share = self._steps_per_token.get(category or DEFAULT_CATEGORY, self._steps_per_token[DEFAULT_CATEGORY])
        return Steps(None, max(round(tokens * share), min(tokens, 1)))


def expected_steps_per_token(rates: Sequence[float], dispersion: float) -> float:
    """E[1 ÷ τ] over requests: an unlucky request needs more steps than a lucky one saves (Gauss-Hermite over the requests' luck)."""
    if not dispersion:
        return 1.0 / (1.0 + sum(rates))
    thresholds = ndtri(np.array(rates))[:, None]
    taus = 1.0 + ndtr((thresholds - np.sqrt(dispersion) * _LUCK) / np.sqrt(1.0 - dispersion)).sum(axis=0)
    return float(_WEIGHTS @ (1.0 / taus) / _WEIGHTS.sum())
