"""What speculation costs a server, from measured trials: the step, the KV cache it takes, the longer start. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

Regime = Literal["memory-bound", "compute-bound", "between"]

MEMORY_BOUND, COMPUTE_BOUND = 0.25, 0.75
"""Elasticity of the step time below and above which a step is called bound by memory or by arithmetic."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """Off against on of one server. None: not measured or not published by the engine."""

    regime: Regime | None
    step_time_elasticity: float | None  # d log(step time) / d log(batch size) of off, near the trace's own batch size
    step_cost_ratio: float | None  # time of a step with speculation over one without, there
    draft_and_verify_share: float | None  # of a step with speculation: what it takes beyond a step without, 1 − 1 ÷ ratio
    kv_cache_tokens_off: int | None
    kv_cache_tokens_on: int | None
    concurrency_ceiling_off: float | None  # requests of mean length that the KV cache holds at once
    concurrency_ceiling_on: float | None
    startup_off_s: float | None
    startup_on_s: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def reasons(self) -> list[str]:
        """What of it a reader of the verdict wants to know, in words."""
        lines = []
        if self.regime and self.step_time_elasticity is not None:
            effect = {
                "memory-bound": "verifying more tokens in a step is nearly free",
                "compute-bound": "every token that is verified costs its share",
                "between": "verifying more tokens costs part of a step",
            }[self.regime]
            name = "between memory- and compute-bound" if self.regime == "between" else self.regime
            lines.append(
                f"Decoding without speculation is {name} at this batch size (twice the batch takes "
                f"{2**self.step_time_elasticity:.2f}x the time of a step): {effect}."
            )
        lost = _lost(self.kv_cache_tokens_off, self.kv_cache_tokens_on)
        if lost and self.concurrency_ceiling_off and self.concurrency_ceiling_on:
            lines.append(
                f"Speculation takes {lost:.1%} of the KV cache: {self.concurrency_ceiling_on:.0f} requests of mean length fit "
                f"instead of {self.concurrency_ceiling_off:.0f}."
            )
        added_s = (self.startup_on_s or 0.0) - (self.startup_off_s or 0.0)
        if self.startup_off_s and self.startup_on_s and added_s > max(1.0, 0.1 * self.startup_off_s):
            lines.append(
                f"A cold start takes {self.startup_on_s:.0f} s instead of {self.startup_off_s:.0f} s "
                "(one start each, so only a hint)."
            )
        return lines


def overhead(
    off_steps: Sequence[tuple[float, float]],
    at_batch: float,
    step_cost_ratio: float | None,
    *,
    kv_cache_tokens: tuple[int | None, int | None] = (None, None),
    mean_request_tokens: float | None = None,
    startup_s: tuple[float | None, float | None] = (None, None),
) -> Overhead:
    """Overhead of speculation. Pairs are (off, on).

    Args:
        off_steps: (batch size, seconds of a decode step) of off, ascending by batch size. TPOT without speculation is the step.
        at_batch: the batch size that matters, the trace's own mean.
        mean_request_tokens: prompt and output together.
    """
    elasticity = step_elasticity(off_steps, at_batch)
    off_tokens, on_tokens = kv_cache_tokens
    return Overhead(
        regime=None if elasticity is None else regime_of(elasticity),
        step_time_elasticity=elasticity,
        step_cost_ratio=step_cost_ratio,
        draft_and_verify_share=max(0.0, 1 - 1 / step_cost_ratio) if step_cost_ratio else None,
        kv_cache_tokens_off=off_tokens,
        kv_cache_tokens_on=on_tokens,
        concurrency_ceiling_off=_ceiling(off_tokens, mean_request_tokens),
        concurrency_ceiling_on=_ceiling(on_tokens, mean_request_tokens),
        startup_off_s=startup_s[0],
        startup_on_s=startup_s[1],
    )


def step_elasticity(steps: Sequence[tuple[float, float]], at_batch: float) -> float | None:
    """Slope of log(step time) over log(batch size) between the two measured batch sizes around `at_batch` (else the nearest two).

    0: the step takes as long whatever the batch (reading weights dominates); 1: its time is proportional to the batch.
    """
    known = [(b, s) for b, s in steps if b > 0 and s > 0]
    if len(known) < 2:
        return None
    spans = list(pairwise(known))
    (b0, s0), (b1, s1) = min(spans, key=lambda span: abs(math.log(math.sqrt(span[0][0] * span[1][0]) / max(at_batch, 1.0))))
    return math.log(s1 / s0) / math.log(b1 / b0)


def regime_of(elasticity: float) -> Regime:
    if elasticity < MEMORY_BOUND:
        return "memory-bound"
    return "compute-bound" if elasticity > COMPUTE_BOUND else "between"


def _ceiling(tokens: int | None, mean_request_tokens: float | None) -> float | None:
    return tokens / mean_request_tokens if tokens and mean_request_tokens else None


def _lost(off: int | None, on: int | None) -> float | None:
    return 1 - on / off if off and on and on < off else None
