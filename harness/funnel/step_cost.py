"""The time of one decode step as a function of batch, K and context, fitted to loads.

    t = fixed + token · T + context · B · C + prefill · P + experts · touched
        + drafted · (draft fixed + draft pass · passes + draft token · B · K)

with T = B (1 + K · drafted) tokens verified, C tokens of context, P prompt tokens prefilled per step, `passes` = K for drafters that
draft one token after the other, and touched = 1 − (1 − share)^T of the experts (all of them in a step with a prompt). The first term
and the contexts are memory-bound (weights and KV cache are read whatever T is), the tokens compute-bound. Relative errors are
minimised, coefficients are not negative, and what the loads cannot tell apart is kept small (a ridge on each term's share of the
step).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import nnls

from backends.types import ServingConfig
from harness.funnel.acceptance import DraftKey, draft_key
from harness.funnel.observation import Array, Observation

EXPERT_SHARES = (1.0, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64)  # 1: a dense model
ONE_PASS = frozenset({"ngram", "suffix", "medusa", "p_eagle", "dflash", "dspark"})
"""Drafters whose draft takes one pass, whatever K is."""
TARGET_TERMS = ("fixed", "token", "context", "prefill", "experts")
_TARGET_RIDGE, _DRAFT_RIDGE = (0.0, 0.002, 0.002, 0.0, 0.02), (0.05, 0.02, 0.06)
"""Of a draft's cost at one K, which does not say what of it is fixed, about a pass's worth is taken to be: six parts of seven go to the
passes. On the reference engine 0.4 to 2.8 passes are fixed (EAGLE-3 and an int4 copy at batch sizes 1 and 4)."""
_ENOUGH = 2  # loads more than coefficients from which on a mixture of experts may be told from a dense model


@dataclass(frozen=True, slots=True)
class DraftCost:
    fixed_s: float = 0.0
    pass_s: float = 0.0
    token_s: float = 0.0  # for each sequence and position
    only_k: int | None = None  # the one K measured where drafts show: the split into fixed and passes is a guess


@dataclass(frozen=True, slots=True)
class StepCost:
    """Fitted coefficients of one target (engine, quantization) and its drafters; seconds."""

    fixed_s: float
    token_s: float
    context_token_s: float
    prefill_token_s: float
    experts_s: float
    expert_share: float
    drafts: Mapping[DraftKey, DraftCost] = field(default_factory=dict)
    error: float = 0.0  # relative standard error of a step's time, from the residuals
    loads: int = 0

    def verify_s(self, batch: float, k: float, context: float) -> float:
        """The target's share of a step: `batch` sequences with `k` draft tokens each."""
        tokens = batch * (1 + k)
        experts = self.experts_s * touched(self.expert_share, tokens)
        return self.fixed_s + experts + self.token_s * tokens + self.context_token_s * batch * context

    def draft_s(self, config: ServingConfig, batch: float, drafted_share: float) -> float:
        """The drafter's share of a step."""
        cost = self.drafts.get(draft_key(config))
        if cost is None or not config.k:
            return 0.0
        return drafted_share * (cost.fixed_s + cost.pass_s * passes(config) + cost.token_s * batch * config.k)

    def step_s(self, config: ServingConfig, batch: float, context: float, *, drafted: float = 1.0) -> float:
        """Seconds of one step of `config` without prefill."""
        return self.verify_s(batch, config.k * drafted, context) + self.draft_s(config, batch, drafted)

    def split_doubt(self, config: ServingConfig, batch: float, context: float) -> float:
        """How much longer a step would be, relative, if all of a draft's cost at the one measured K were fixed rather than paid for
        each pass. 0 at that K, for drafters of one pass, and where two K were measured."""
        cost = self.drafts.get(draft_key(config))
        if cost is None or cost.only_k is None or config.variant in ONE_PASS:
            return 0.0
        total = cost.fixed_s + cost.pass_s * cost.only_k
        return total * (1 - config.k / cost.only_k) / self.step_s(config, batch, context)

    def memory_share(self, batch: float, k: int, context: float) -> float:
        """Part of the verification that is spent on reading weights and KV cache."""
        return 1 - self.token_s * batch * (1 + k) / self.verify_s(batch, k, context)

    def crossover_batch(self, k: int) -> float | None:
        """Batch size at which arithmetic takes as long as reading the weights; None where it never does."""
        tokens = (self.fixed_s + self.experts_s) / self.token_s if self.token_s > 0 else None
        return tokens / (1 + k) if tokens else None


def touched(share: float, tokens: float) -> float:
    """Experts that a step reads, of all; 0 for a dense model, which has none."""
    return 1 - (1 - share) ** tokens if share < 1 else 0.0


def passes(config: ServingConfig) -> int:
    return 1 if config.variant in ONE_PASS else config.k


def fit(loads: Sequence[Observation]) -> StepCost:
    """Fit to all loads of one group. Needs off at one batch size or more; a drafter's cost is known from its first load on.

    Raises:
        ValueError: no load without speculation.
    """
    offs = [load for load in loads if load.config.variant == "off"]
    if not offs:
        raise ValueError("a step-cost fit needs a load without speculation")
    keys = list(dict.fromkeys(draft_key(load.config) for load in loads if load.config.k))
    batches = {load.batch_size for load in offs}
    shares = EXPERT_SHARES if len(batches) >= len(TARGET_TERMS) + _ENOUGH else (1.0,)
    fits = [_fit(loads, min(offs, key=lambda load: load.batch_size), keys, share) for share in shares]
    return min(fits, key=lambda found: (found[1], -found[0].expert_share))[0]


def _fit(loads: Sequence[Observation], smallest: Observation, keys: Sequence[DraftKey], share: float) -> tuple[StepCost, float]:
    rows = [_row(load, keys, share) for load in loads]
    times = [load.step_s for load in loads]
    # A request alone on the server: its first token is one step with its whole prompt.
    prompt = float(smallest.prefill_tokens.mean())
    rows.append(np.array([1.0, 0.0, 0.0, prompt, 1.0 if share < 1 else 0.0, *([0.0] * 3 * len(keys))]))
    times.append(max(float(smallest.ttft_s.mean()), smallest.step_s))
    design = np.array(rows) / np.array(times)[:, None]
    ridge = np.diag(np.array([*_TARGET_RIDGE, *(_DRAFT_RIDGE * len(keys))]) * design.mean(axis=0))
    found, _ = nnls(np.vstack([design, ridge]), np.concatenate([np.ones(len(rows)), np.zeros(len(ridge))]))
    residuals = design[:-1] @ found - 1.0
    free = max(len(loads) - int((found > 0).sum()), 1)
    error = math.sqrt(float(residuals @ residuals) / free)
    measured = {key: _ks_where_drafts_show(loads, key) for key in keys}
    drafts = {}
    for i, key in enumerate(keys):
        fixed, each, token = found[5 + 3 * i : 8 + 3 * i].tolist()
        drafts[key] = DraftCost(fixed, each, token, max(measured[key]) if len(measured[key]) == 1 else None)
    fixed, token, context, prefill, experts = found[:5].tolist()
    return StepCost(fixed, token, context, prefill, experts, share, drafts, error, len(loads)), error


def _ks_where_drafts_show(loads: Sequence[Observation], key: DraftKey) -> set[int]:
    """The K that a drafter was measured at with its smallest batch size: a draft is the largest part of a step there."""
    mine = [load for load in loads if draft_key(load.config) == key]
    smallest = min(load.batch_size for load in mine)
    return {load.config.k for load in mine if load.batch_size == smallest}


def _row(load: Observation, keys: Sequence[DraftKey], share: float) -> Array:
    """The terms' factors for one load, in the order of `TARGET_TERMS`, then three for each drafter."""
    batch, k = load.mean_batch, load.config.k
    tokens = batch * (1 + k * load.drafted_share)
    with_prompt = min(1.0, len(load.requests) * batch / load.decode_steps)  # share of steps
    experts = (1 - with_prompt) * touched(share, tokens) + with_prompt if share < 1 else 0.0
    row = np.zeros(5 + 3 * len(keys))
    row[:5] = (1.0, tokens, batch * load.context_tokens, load.prefill_tokens_per_step, experts)
    if k:
        at = 5 + 3 * keys.index(draft_key(load.config))
        chain = passes(load.config) == k
        row[at : at + 3] = load.drafted_share * np.array([1.0, k if chain else 0.0, batch * k])
    return row
