"""What would change the verdict: the deciding speed-up if acceptance or load were another. Predictions from measured figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from harness.decide import BatchEvidence, Ratio

ACCEPTANCE_STEP = 0.1
LOAD_FACTORS = (0.5, 1.5)

Outcome = Literal["on", "off", "no clear winner"]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One change and the speed-up predicted under it; None where nothing measured reaches that far."""

    change: str
    speedup: float | None
    ci95: tuple[float, float] | None
    outcome: Outcome | None
    changes_verdict: bool | None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "predicted": True}


def outcome_of(ratio: Ratio) -> Outcome:
    if ratio.better:
        return "on"
    return "off" if ratio.worse else "no clear winner"


def tau_with(position_rates: Sequence[float], drafted_share: float, shift: float) -> float:
    """tau if every draft token's chance of acceptance, given that all before it were accepted, were `shift` higher.

    `position_rates` are marginal over all decode steps; `drafted_share` of these had a draft at all, which does not change.
    """
    tau, reached, before = 1.0, drafted_share, drafted_share
    for rate in position_rates:
        conditional = rate / before if before > 0 else 0.0
        before = rate
        reached *= min(1.0, max(0.0, conditional + shift))
        tau += reached
    return tau


def acceptance_what_ifs(
    base: Ratio, position_rates: Sequence[float], drafted_share: float, decode_share_on: float
) -> list[WhatIf]:
    """The speed-up if acceptance were 0.1 lower or higher, at the measured cost of a step.

    Args:
        base: the deciding speed-up as measured.
        decode_share_on: part of the E2E with speculation that is decoding, TTFT excluded; only that part scales with 1 ÷ tau.
    """
    tau = tau_with(position_rates, drafted_share, 0.0)
    rows = []
    for shift in (-ACCEPTANCE_STEP, ACCEPTANCE_STEP):
        changed = tau_with(position_rates, drafted_share, shift)
        factor = 1 / (1 - decode_share_on + decode_share_on * tau / changed)
        rows.append(_row(f"acceptance of each draft token {shift:+.1f}", base, _scaled(base, factor), f"tau {changed:.2f}"))
    return rows


def load_what_ifs(base: Ratio, by_batch: Sequence[BatchEvidence], mean_batch: float) -> list[WhatIf]:
    """The speed-up if half or one and a half times as many requests came, by the measured curve over batch sizes.

    The batch is taken to grow with the load (Little's law at unchanged time in the server). The curve's shape is applied to the
    deciding speed-up, so that the change and not the way of measuring is what shows. Nothing is said beyond the measured sizes.
    """
    here = _at(by_batch, mean_batch)
    rows = []
    for factor in LOAD_FACTORS:
        change = f"load {(factor - 1) * 100:+.0f} %"
        there = _at(by_batch, max(mean_batch * factor, 1.0))
        if here is None or there is None:
            rows.append(WhatIf(change, None, None, None, None, "beyond the measured batch sizes"))
            continue
        note = f"batch size about {max(mean_batch * factor, 1.0):.1f}"
        rows.append(_row(change, base, _scaled(base, there / here), note))
    return rows


def _row(change: str, base: Ratio, ratio: Ratio, note: str) -> WhatIf:
    outcome = outcome_of(ratio)
    return WhatIf(change, ratio.value, ratio.ci95, outcome, outcome != outcome_of(base), note)


def _scaled(base: Ratio, factor: float) -> Ratio:
    return Ratio(base.value * factor, (base.ci95[0] * factor, base.ci95[1] * factor) if base.ci95 else None)


def _at(by_batch: Sequence[BatchEvidence], batch: float) -> float | None:
    """Speed-up at a batch size, linear in (log batch, log speed-up) between measured ones; the smallest stands for all below it."""
    points = [(math.log(e.batch_size), math.log(e.speedup.value)) for e in by_batch]
    x = math.log(batch)
    if not points or x > points[-1][0] + 1e-9:
        return None
    if x <= points[0][0]:
        return math.exp(points[0][1])
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
    return math.exp(points[-1][1])
