"""Why a configuration needs no (further) measuring, with the evidence in words. None: go on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import wilcoxon

from backends.types import ServingConfig
from harness.funnel.acceptance import Curve
from harness.funnel.observation import Observation, Workload
from harness.funnel.step_cost import StepCost

DEAD_TAU = 1.02
COPYING = 0.01
"""τ of K + 1 less this: every draft was accepted. Text that copies does that, and so does a verification that checks nothing."""
MIN_PAIRS = 8
_LEVEL = 0.01


def dead(load: Observation) -> str | None:
    """A drafter of which hardly a token is accepted costs and gains nothing at any K."""
    if load.tau >= DEAD_TAU:
        return None
    return f"dead drafter: tau {load.tau:.3f} over {load.decode_steps:.0f} decode steps at K = {load.config.k}"


def accepts_everything(load: Observation) -> bool:
    return load.config.k > 0 and load.tau >= load.config.k + 1 - COPYING


def cannot_win(
    configs: Sequence[ServingConfig],
    cost: StepCost,
    curves: Sequence[tuple[Workload, Curve]],
    context_tokens: float,
    to_beat: float,
) -> str | None:
    """Whether a drafter loses at every K even if drafting were free: verification alone costs more than the upper end of τ gains.

    `to_beat`: the log speed-up of the best so far. A drafter may gain in decoding only, so prefill is left out, in its favour.
    """
    best, best_config = -math.inf, configs[0]
    for config in configs:
        total = 0.0
        for workload, curve in curves:
            tau = curve.tau(config.k)
            upper = tau.ci95[1] if tau.ci95 else tau.value
            for batch, share in workload.weights.items():
                plain = cost.verify_s(batch, 0, context_tokens)
                verify = cost.verify_s(batch, config.k * curve.drafted_share, context_tokens)
                total += share * math.log(upper * plain / verify) / len(curves)
        if total > best:
            best, best_config = total, config
    margin = 1.96 * math.sqrt(2) * max(cost.error, 0.01)
    if best + margin > to_beat:
        return None
    return (
        f"cannot win even with a free draft: {best_config.label()}, the best K, gains at most {math.exp(best):.3f}x "
        f"(within {margin:.1%}), to beat is {math.exp(to_beat):.3f}x"
    )


def loses_pairwise(load: Observation, incumbent: Observation, margin: float) -> str | None:
    """One-sided Wilcoxon signed-rank test on the requests that both served at equal load: slower by more than `margin` (log)."""
    places = {request: i for i, request in enumerate(incumbent.requests)}
    rows = [(i, places[request]) for i, request in enumerate(load.requests) if request in places]
    if len(rows) < MIN_PAIRS:
        return None
    ours, theirs = (np.array(column) for column in zip(*rows, strict=True))
    slower = np.log(load.e2e_s[ours] / incumbent.e2e_s[theirs])
    p = float(wilcoxon(slower - margin, alternative="greater").pvalue)
    if p >= _LEVEL:
        return None
    return (
        f"slower than {incumbent.config.label()} on {len(rows)} paired requests at batch size {load.batch_size}: "
        f"median {math.expm1(float(np.median(slower))):+.1%}, Wilcoxon p = {p:.2g}"
    )
