"""Every cell of the grid, predicted: the loads are run in virtual time on an engine with the fitted step costs and acceptance.

A prediction is no measurement and is called a prediction wherever it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from backends.simulated.virtual import SimulatedRequest
from backends.simulated.world import DEFAULT_CATEGORY, Draft, Limits, TargetCost, World
from backends.types import ServingConfig
from harness.funnel.acceptance import Acceptances, Curve, draft_key
from harness.funnel.observation import Observation, Workload
from harness.funnel.step_cost import DraftCost, StepCost, passes
from harness.funnel.virtual_load import VirtualLoad, closed_loop

MAX_REQUESTS = 256
"""Requests of one virtual load (or the batch size, where that is more): virtual time is cheap, not free. With as many as fill a large
batch once, the first requests' wait for the prompts of all others shifts p50 by 6 %."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """One cell, on one workload."""

    tau: float
    e2e_p50_s: float
    e2e_p95_s: float
    tpot_p50_s: float
    ttft_p95_s: float
    output_tokens_per_s: float
    goodput_rps: float | None  # None where no SLO was given

    def objective(self, name: str) -> float:
        """What is to be small: a latency, or the reciprocal of a rate."""
        if name in ("throughput", "cost"):
            return 1.0 / self.output_tokens_per_s
        if name == "goodput":
            return 1.0 / max(self.goodput_rps or 0.0, 1e-9)
        return float({"e2e_p50": self.e2e_p50_s, "e2e_p95": self.e2e_p95_s, "tpot_p50": self.tpot_p50_s}[name])


def world_of(config: ServingConfig, cost: StepCost, curve: Curve | None, kv_cache_tokens: int | None = None) -> World:
    """A simulated engine with the fitted costs and the KV cache that the engine said it has. `curve` is None for off.

    It has no CUDA graphs, no prefix cache and no noise: what of these the loads showed is in the coefficients.
    """
    target = TargetCost(
        fixed_s=cost.fixed_s,
        weights_s=0.0,
        token_s=cost.token_s,
        prefill_token_s=cost.prefill_token_s,
        context_token_s=cost.context_token_s,
        expert_weights_s=cost.experts_s,
        expert_share=cost.expert_share,
    )
    limits = Limits(
        max_num_seqs=config.max_num_seqs,
        chunked_prefill=config.chunked_prefill,
        prefix_caching=False,
        kv_capacity_tokens=kv_cache_tokens or 1 << 40,
        max_model_len=1 << 30,
    )
    drafts = {config.variant: _draft(config, cost.drafts.get(draft_key(config), DraftCost()), curve)} if curve else {}
    return World("prediction", target, drafts=drafts, limits=limits)


def _draft(config: ServingConfig, cost: DraftCost, curve: Curve) -> Draft:
    rates = curve.rates_at(config.k)
    share = max(curve.drafted_share, rates[0], 1e-6)
    return Draft(
        position_rates={DEFAULT_CATEGORY: rates},
        draft_rate=min(share, 1.0),
        parallel=passes(config) != config.k,
        step_fixed_s=cost.fixed_s,
        pass_s=cost.pass_s,
        draft_token_s=cost.token_s,
    )


def predict(
    config: ServingConfig,
    batch_size: int,
    workload: Workload,
    cost: StepCost,
    curve: Curve | None,
    *,
    kept_hits: float = 1.0,
    kv_cache_tokens: int | None = None,
    slo: Mapping[str, float] | None = None,
) -> Prediction:
    """One closed-loop load in virtual time, with the workload's own lengths. `kept_hits`: prefix-cache hits ÷ those with off.

    Throughput is that of busy slots: batch × Σ tokens ÷ Σ time in the slot.
    """
    order = _spread(workload, max(min(len(workload.input_tokens), MAX_REQUESTS), batch_size))
    left = 1 - workload.prefix_hit_rate * kept_hits
    requests = [SimulatedRequest(0.0, max(1, round(workload.input_tokens[i] * left)), workload.output_tokens[i]) for i in order]
    world = world_of(config, cost, curve, kv_cache_tokens)
    run = closed_loop(world, requests, variant=config.variant, k=config.k, concurrency=batch_size, luck=False)
    p50, p95 = np.quantile(run.e2e_s, (0.5, 0.95))
    return Prediction(
        tau=curve.tau(config.k).value if curve else 1.0,
        e2e_p50_s=float(p50),
        e2e_p95_s=float(p95),
        tpot_p50_s=float(np.nanmedian(run.tpot_s)),
        ttft_p95_s=float(np.quantile(run.ttft_s, 0.95)),
        output_tokens_per_s=batch_size * float(run.output_tokens.sum() / run.e2e_s.sum()),
        goodput_rps=_goodput(run, batch_size, slo) if slo else None,
    )


def _spread(workload: Workload, count: int) -> list[int]:
    """Positions of `count` requests whose lengths are spread as the workload's are: its evenly spaced quantiles by output, then
    input tokens, in the workload's order; all of them again where there are too few."""
    lengths = np.array([workload.output_tokens, workload.input_tokens])
    total = lengths.shape[1]
    if count >= total:
        return list(np.resize(np.arange(total), count))
    places = ((np.arange(count) + 0.5) * total / count).astype(int)
    return sorted(np.lexsort(lengths[::-1])[places].tolist())


def ratios(
    load: Observation, cost: StepCost, curve: Curve | None, *, kv_cache_tokens: int | None = None
) -> tuple[float, float]:
    """Measured ÷ predicted for a load's own requests: all their time (without their luck in acceptance), and TTFT alone."""
    config = load.config
    requests = [SimulatedRequest(0.0, round(i), int(o)) for i, o in zip(load.prefill_tokens, load.output_tokens, strict=True)]
    world = world_of(config, cost, curve, kv_cache_tokens)
    run = closed_loop(world, requests, variant=config.variant, k=config.k, concurrency=load.batch_size, luck=False)
    tau = curve.tau(config.k).value if curve else 1.0
    measured = load.ttft_s.sum() + (load.e2e_s - load.ttft_s).sum() * load.tau / tau
    return float(measured / run.e2e_s.sum()), float(load.ttft_s.sum() / run.ttft_s.sum())


def _goodput(run: VirtualLoad, batch_size: int, slo: Mapping[str, float]) -> float:
    latencies = {"ttft": run.ttft_s, "tpot": run.tpot_s, "e2e": run.e2e_s}
    met = np.ones(len(run.e2e_s), dtype=bool)
    for name, limit_s in slo.items():
        met &= ~(latencies[name.split("_")[0]] > limit_s)  # a TPOT that is not defined breaks no limit
    return batch_size * float(met.sum() / run.e2e_s.sum())


Grid = dict[tuple[ServingConfig, int, str], Prediction]


def predict_grid(
    configs: Sequence[ServingConfig],
    batch_sizes: Sequence[int],
    workloads: Sequence[Workload],
    cost: StepCost,
    acceptance: Acceptances,
    kept_hits: Callable[[ServingConfig, str], float],
    *,
    kv_cache_tokens: int | None = None,
    slo: Mapping[str, float] | None = None,
) -> Grid:
    """All cells whose acceptance is known."""
    grid: Grid = {}
    for config in configs:
        for workload in workloads:
            curve = acceptance(config, workload.name) if config.k else None
            if config.k and (curve is None or len(curve.rates) < config.k):
                continue
            kept = kept_hits(config, workload.name)
            for batch in batch_sizes:
                cell = predict(config, batch, workload, cost, curve, kept_hits=kept, kv_cache_tokens=kv_cache_tokens, slo=slo)
                grid[config, batch, workload.name] = cell
    return grid


def break_even(speedups: Mapping[int, tuple[float, float]]) -> dict[str, Any]:
    """Batch size at which a predicted log speed-up falls through 0, with an interval.

    `speedups`: batch size -> (log speed-up, its standard deviation). The interval is where the 95 % band's ends fall through 0; an
    end that does not cross within the measured batch sizes is None.
    """
    points = sorted((math.log(batch), mean, sd) for batch, (mean, sd) in speedups.items())

    def crossing(z: float) -> float | None:
        for (x0, m0, s0), (x1, m1, s1) in pairwise(points):
            y0, y1 = m0 + z * s0, m1 + z * s1
            if y0 > 0 >= y1:
                return math.exp(x0 + (x1 - x0) * y0 / (y0 - y1))
        return None

    return {"value": crossing(0.0), "ci95": [crossing(-1.96), crossing(1.96)]}
