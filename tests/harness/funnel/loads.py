"""Observations from simulated engines of known cost and acceptance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from backends.simulated.virtual import SimulatedRequest
from backends.simulated.world import Draft, Limits, Noise, TargetCost, World
from backends.types import ServingConfig
from harness.funnel.observation import Observation, Workload
from harness.funnel.virtual_load import closed_loop

RATES = (0.7, 0.5, 0.35, 0.25, 0.15, 0.1)
OFF = ServingConfig(backend="simulated", model="w", max_num_seqs=128)
WORLD = World(
    "known",
    TargetCost(fixed_s=0.001, weights_s=0.009, token_s=1e-4, prefill_token_s=5e-5, context_token_s=2e-8),
    drafts={
        "eagle3": Draft({"default": RATES}, step_fixed_s=5e-4, pass_s=4e-4, draft_token_s=1e-5),
        "mtp": Draft({"default": (0.4, 0.2, 0.1, 0.05, 0.02, 0.01)}, pass_s=6e-4),
        "ngram": Draft({"default": (0.001,) * 6}, draft_rate=0.5, parallel=True, step_fixed_s=1e-4),
    },
    limits=Limits(max_num_seqs=128, prefix_caching=False),
)
REQUESTS = tuple(
    SimulatedRequest(0.0, int(i), int(o))
    for i, o in zip(np.random.default_rng(0).integers(50, 900, 64), np.random.default_rng(1).integers(40, 200, 64), strict=True)
)


def on(variant: str, k: int) -> ServingConfig:
    return ServingConfig.from_dict({**OFF.to_dict(), "variant": variant, "k": k})


def observe(config: ServingConfig, batch: int, world: World = WORLD, count: int = 64, *, seed: int = 0) -> Observation:
    """One load in virtual time, as the main job would have measured it."""
    requests = REQUESTS[:count]
    run = closed_loop(world, requests, variant=config.variant, k=config.k, concurrency=batch, seed=seed)
    steps = run.counters.decode_steps or 1
    return Observation(
        config=config,
        batch_size=batch,
        workload="t",
        requests=tuple(range(count)),
        input_tokens=np.array([r.input_tokens for r in requests], dtype=float),
        output_tokens=run.output_tokens,
        ttft_s=run.ttft_s,
        e2e_s=run.e2e_s,
        tau=run.counters.tau or 1.0,
        position_rates=tuple(n / steps for n in run.counters.accepted_per_position or ()),
        drafted_share=(run.counters.drafted_steps or 0) / steps,
        prefix_hit_rate=0.0,
        cost_s=run.wall_s,
    )


def workload(weights: dict[int, float]) -> Workload:
    inputs, outputs = tuple(r.input_tokens for r in REQUESTS), tuple(r.output_tokens for r in REQUESTS)
    return Workload("t", inputs, outputs, 0.0, weights)


def noisy(world: World = WORLD) -> World:
    return replace(world, noise=Noise(step_sigma=0.05, run_sigma=0.005))
