"""The decision of a gate: pure functions over the blocks measured so far.

A look at the data can end in a suspicion, a pass, or neither.

* Suspicion: some metric is worse by more than its band, and worse than equal at the level of this look (Holm over all metrics,
  error spent over looks). It turns red when *fresh* blocks alone show the same metric worse again and all blocks together still
  put it beyond the band. So a red needs two independent pieces of evidence; one suspicion is followed up, never a second.
* Pass: for every required metric the upper confidence bound of the change lies inside the band (an intersection-union test
  needs no correction over metrics: Berger 1982), the 95 % interval is narrower than the band on either side, and no request failed.
  Here, and only here, the noise of earlier gates is pooled in: a few blocks can look quiet by luck.
* Requests of the candidate that fail in two blocks are red; in one block alone they only forbid a pass.
* Otherwise the gate goes on, and is inconclusive when its budget ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from harness.gate.compare import band_of, compare, divergence, failing_blocks, gating, keys_of, mean_change
from harness.gate.explain import DIVERGENCE, FAILURES, answers_of, causes_of, reasons_of
from harness.gate.metrics import metric_of
from harness.gate.statistics import Mean, Noise, holm, level
from harness.gate.types import Block, Comparison, Outcome, Progress, Rules, Verdict

LOOKS = (0.2, 0.35, 0.5, 0.65, 1.0)
"""Fractions of the budget at which the data are looked at (and whenever a confirmation is complete)."""

LAST_SUSPICION = 0.65
"""Fraction of the budget by which all error for suspicions is spent: the rest is what a confirmation takes."""


KNOWN_FREEDOM = 20
"""Degrees of freedom from which on the noise of earlier gates counts as known."""

WIDEST = 0.8
"""Share of the band that a 95 % interval may reach to either side in a pass."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one look found. `verdict` is final if `decided`, else it says how things stand."""

    verdict: Verdict
    progress: Progress
    decided: bool


def confirmation_blocks(suspected_at: int) -> int:
    """Fresh blocks that confirm a suspicion: half of what raised it, and three of either order at least."""
    return max(6, math.ceil(suspected_at / 2))


def confirming(blocks: int, progress: Progress) -> bool:
    """Whether a suspicion still waits for its fresh blocks."""
    at = progress.suspected_at
    return at is not None and not progress.cleared and blocks < at + confirmation_blocks(at)


def decide(
    blocks: Sequence[Block],
    progress: Progress,
    fraction: float,
    rules: Rules,
    known: Mapping[str, Noise] = MappingProxyType({}),
) -> Step:
    """Look at all blocks so far, with `fraction` of the budget used (1.0: this is the last look).

    `known`: the noise of a block's change in earlier gates, by metric. Returns the verdict as it stands; pass the returned progress to
    the next look.
    """
    if failing_blocks(blocks) >= 2:
        return Step(_verdict("regression", blocks, rules, confirmed=[FAILURES]), progress, True)
    if progress.suspected_at is not None and not progress.cleared:
        if confirming(len(blocks), progress):
            return Step(_verdict("inconclusive", blocks, rules, progress), progress, False)
        confirmed = [name for name in progress.suspects if _confirmed(name, blocks, progress.suspected_at, rules)]
        if confirmed:
            return Step(_verdict("regression", blocks, rules, confirmed=confirmed), progress, True)
        progress = replace(progress, cleared=True)
    elif suspects := _suspects(blocks, progress, fraction, rules):
        progress = Progress(fraction, suspects, len(blocks))
        return Step(_verdict("inconclusive", blocks, rules, progress), progress, False)
    equal = _shown_equal(blocks, progress.fraction, fraction, rules, known)
    outcome: Outcome = "pass" if equal and not failing_blocks(blocks) else "inconclusive"
    progress = replace(progress, fraction=max(fraction, progress.fraction))
    return Step(_verdict(outcome, blocks, rules, progress), progress, equal)


def _suspects(blocks: Sequence[Block], progress: Progress, fraction: float, rules: Rules) -> tuple[str, ...]:
    if progress.cleared or len(blocks) < rules.min_blocks or progress.fraction >= LAST_SUSPICION:
        return ()
    alpha = level(rules.suspect_alpha, progress.fraction / LAST_SUSPICION, fraction / LAST_SUSPICION)
    adjusted = holm(_p_values(blocks, rules))
    return tuple(name for name, p in adjusted.items() if p <= alpha and _beyond_band(name, blocks, rules))


def _p_values(blocks: Sequence[Block], rules: Rules) -> dict[str, float]:
    found = {key: mean_change(key, blocks).p_above(0.0) for key in keys_of(blocks) if gating(key, blocks)}
    if rules.lossless and (compared := divergence(blocks)).requests:
        found[DIVERGENCE] = compared.p
    return found


def _beyond_band(name: str, blocks: Sequence[Block], rules: Rules) -> bool:
    if name == DIVERGENCE:
        return divergence(blocks).excess > rules.divergence_band
    return mean_change(name, blocks).value > band_of(name, rules)


def _confirmed(name: str, blocks: Sequence[Block], suspected_at: int, rules: Rules) -> bool:
    """Fresh blocks alone show it, at half the band or more, and all blocks together put it beyond the band."""
    fresh = blocks[suspected_at:]
    if name == DIVERGENCE:
        return divergence(fresh).p <= rules.confirm_alpha and _beyond_band(name, blocks, rules)
    mean = mean_change(name, fresh)
    again = mean.p_above(0.0) <= rules.confirm_alpha and mean.value > band_of(name, rules) / 2
    return again and _beyond_band(name, blocks, rules)


def least_blocks_to_pass(required: Sequence[str], rules: Rules, known: Mapping[str, Noise]) -> int:
    """Fewer where the noise of all `required` metrics is known from earlier gates."""
    is_known = all(key in known and known[key].freedom >= KNOWN_FREEDOM for key in required)
    return min(rules.min_blocks_where_noise_is_known if is_known else rules.min_blocks_to_pass, rules.max_blocks)


def _shown_equal(blocks: Sequence[Block], before: float, now: float, rules: Rules, known: Mapping[str, Noise]) -> bool:
    required = [key for key in keys_of(blocks) if metric_of(key).required]
    if len(blocks) < least_blocks_to_pass(required, rules, known) or not required:
        return False
    alpha = level(rules.pass_alpha, before, now)
    means = {key: mean_change(key, blocks).steadied(known.get(key)) for key in required}
    return all(_equal(mean, band_of(key, rules), alpha) for key, mean in means.items())


def _equal(mean: Mean, band: float, alpha: float) -> bool:
    """The bound lies inside the band, and the interval is narrower than it: a noisy sample rarely passes by luck."""
    interval = mean.interval()
    return interval is not None and (interval[1] - interval[0]) / 2 <= WIDEST * band and mean.p_below(band) <= alpha


def _verdict(
    outcome: Outcome, blocks: Sequence[Block], rules: Rules, progress: Progress | None = None, confirmed: Sequence[str] = ()
) -> Verdict:
    keys = keys_of(blocks)
    several = len({key.partition("@")[2] for key in keys}) > 1
    comparisons = tuple(compare(key, blocks, rules, several_loads=several) for key in keys)
    answers = answers_of(comparisons, blocks, divergence(blocks), rules)
    needed = pairs_needed(comparisons, len(blocks)) if outcome == "inconclusive" else None
    return Verdict(
        outcome=outcome,
        reasons=reasons_of(outcome, comparisons, answers, len(blocks), progress, confirmed, needed),
        causes=causes_of(comparisons, confirmed) if outcome == "regression" else (),
        answers=answers,
        comparisons=comparisons,
        pairs=2 * len(blocks),
        pairs_needed=needed,
    )


def pairs_needed(comparisons: Sequence[Comparison], blocks: int) -> int | None:
    """More pairs that would decide, from the noise seen so far; None where it is not known yet."""
    required = [c for c in comparisons if c.required]
    counts = [c.blocks_needed for c in [c for c in required if c.status != "equal"] or required if c.blocks_needed is not None]
    return 2 * max(1, max(counts) - blocks) if counts else None
