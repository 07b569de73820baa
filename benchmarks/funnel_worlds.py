"""Worlds of known truth for `benchmarks.funnel`: what the funnel must find its way through, with effects that its own model lacks.

Beyond what the funnel's fit knows, a world may have CUDA-graph sizes with a cliff behind the last of them, too small a KV cache
(preemption), prefix-cache hits that are lost with a draft, acceptance that falls with context and drifts along the trace, step noise with
stalls, servers that differ from start to start, a machine that drifts and one that is slow for some minutes. Acceptance at a small K is
better than the rates of a large one say, by an amount that differs from drafter to drafter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from backends.simulated.presets import PRESETS
from backends.simulated.virtual import SimulatedRequest
from backends.simulated.world import DEFAULT_CATEGORY, Draft, Noise, World

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128)
MAX_K = 12
VARIANTS = ("ngram", "draft_model", "eagle2", "eagle3", "p_eagle", "mtp")
TRACE_REQUESTS = 256
TRIED = 4  # variants in one world
FAMILIES = {
    "8B": ("h100-llama-8b", "h200-llama-8b", "a100-llama-8b"),
    "70B": ("h100-llama-70b", "h200-llama-70b", "a100-llama-70b"),
    "MoE": ("b200-gpt-oss-20b",),
}
STARTUP_S = {"8B": 60.0, "70B": 150.0, "MoE": 80.0}  # weights from disk, compilation, graph capture
CONTEXTS, PHASES = 3, 3  # acceptance by thirds of the context lengths and of the trace
BLOCK_TOKENS = 16
LOOKUP_STRETCH, MODEL_STRETCH = (0.15, 0.38), (0.0, 0.06)  # from, to; `backends.simulated.world.Draft`


@dataclass(frozen=True, slots=True)
class BenchWorld:
    seed: int
    family: str
    world: World
    requests: tuple[SimulatedRequest, ...]  # with arrivals
    loses_prefix_hits: bool  # with a draft
    draft_kv_share: float  # of the KV cache

    def requests_for(self, variant: str) -> tuple[SimulatedRequest, ...]:
        if variant == "off" or not self.loses_prefix_hits:
            return self.requests
        return tuple(replace(request, prefix=()) for request in self.requests)

    def quiet(self) -> World:
        """The truth: the same world without noise, its stalls spread evenly."""
        noise = self.world.noise
        mean_stall_s = noise.stall_share * noise.stall_s
        target = replace(self.world.target, fixed_s=self.world.target.fixed_s + mean_stall_s)
        return replace(self.world, target=target, noise=Noise())

    def with_draft(self, world: World, variant: str) -> World:
        """A draft takes some of the KV cache, which off does not tell."""
        if variant == "off":
            return world
        capacity = int(world.limits.kv_capacity_tokens * (1 - self.draft_kv_share))
        return replace(world, limits=replace(world.limits, kv_capacity_tokens=capacity))

    def at(self, clock_s: float) -> World:
        """The world as a load finds it that begins `clock_s` into the search."""
        noise = self.world.noise
        phase = noise.slow_phase
        shifted = (phase[0] - clock_s, phase[1] - clock_s, phase[2]) if phase else None
        return replace(self.world, noise=replace(noise, slow_phase=shifted))


def make_world(seed: int) -> BenchWorld:
    rng = np.random.default_rng([seed, 2026])
    family = str(rng.choice(list(FAMILIES)))
    base = PRESETS[str(rng.choice(FAMILIES[family]))]()
    step_s = base.target.fixed_s + base.target.weights_s + base.target.expert_weights_s * 0.5
    luck = rng.uniform(0.55, 1.15)  # a workload that is easy or hard for every drafter
    tried = sorted(rng.choice(VARIANTS, TRIED, replace=False).tolist())
    text = np.random.default_rng([seed, 2026, 1])
    drafts = {
        variant: replace(
            _draft(rng, variant, luck, step_s), stretch=text.uniform(*(LOOKUP_STRETCH if variant == "ngram" else MODEL_STRETCH))
        )
        for variant in tried
    }
    requests = _trace(rng, step_s)
    tokens = [r.input_tokens + r.output_tokens for r in requests]
    capacity = max(base.limits.kv_capacity_tokens, 200_000)  # a 70B model has a second GPU where one leaves it no cache
    if rng.random() < 0.35:  # room for 50 to 90 average requests: preemption at the largest batch sizes
        capacity = min(capacity, max(int(np.mean(tokens) * rng.uniform(50, 90)), 2 * max(tokens)))
    limits = replace(
        base.limits,
        max_num_seqs=256,
        kv_capacity_tokens=capacity,
        prefix_caching=bool(rng.random() < 0.6),
        kv_block_tokens=BLOCK_TOKENS,
        graph_max_tokens=int(rng.choice((128, 256, 512, 1024))),
    )
    phase = None
    if rng.random() < 0.3:
        begin = rng.uniform(0, 1500)
        phase = (begin, begin + rng.uniform(120, 600), rng.uniform(1.08, 1.3))
    noise = Noise(
        step_sigma=rng.uniform(0.03, 0.12),
        run_sigma=rng.uniform(0.002, 0.01),
        drift_per_hour=rng.uniform(0.0, 0.03),
        stall_share=0.001,
        stall_s=rng.uniform(0.02, 0.1),
        slow_phase=phase,
    )
    target = replace(base.target, eager_s=rng.uniform(0.05, 0.5) * step_s)
    world = World(
        f"{seed}",
        target,
        drafts=drafts,
        limits=limits,
        noise=noise,
        startup_s=STARTUP_S[family] * rng.uniform(0.7, 1.4),
        seed=seed,
    )
    return BenchWorld(seed, family, world, requests, bool(rng.random() < 0.5), rng.uniform(0.0, 0.1))


def _draft(rng: np.random.Generator, variant: str, luck: float, step_s: float) -> Draft:
    """Costs as shares of the target's step at batch 1; acceptance falls with position, context and along the trace."""
    pass_share, token_share, first = {
        "ngram": ((0.0, 0.0), 0.0, (0.1, 0.75)),
        "draft_model": ((0.06, 0.2), 4e-4, (0.6, 0.85)),
        "eagle2": ((0.02, 0.06), 2e-4, (0.5, 0.75)),
        "eagle3": ((0.02, 0.06), 2e-4, (0.6, 0.85)),
        "p_eagle": ((0.06, 0.2), 3e-4, (0.6, 0.85)),
        "mtp": ((0.03, 0.08), 2e-4, (0.6, 0.9)),
    }[variant]
    rate = min(rng.uniform(*first) * luck, 0.95)
    decay = rng.uniform(0.85, 1.0)
    with_context, with_time = rng.uniform(0.0, 0.25), rng.uniform(-0.1, 0.2)
    has_draft = float(rng.uniform(0.3, 0.9)) if variant == "ngram" else 1.0
    rates = {}
    for context in range(CONTEXTS):
        for phase in range(PHASES):
            here = rate * (1 - with_context * context / (CONTEXTS - 1)) * (1 - with_time * phase / (PHASES - 1))
            conditional = [min(here * decay**i, 0.97) for i in range(MAX_K)]
            rates[_category(context, phase)] = tuple((has_draft * np.cumprod(conditional)).tolist())
    rates[DEFAULT_CATEGORY] = rates[_category(0, 0)]
    return Draft(
        position_rates=rates,
        dispersion=float(rng.uniform(0.0, 0.15)),
        draft_rate=has_draft,
        parallel=variant in ("p_eagle", "ngram"),
        step_fixed_s=rng.uniform(0.0, 0.15) * step_s,
        pass_s=rng.uniform(*pass_share) * step_s,
        draft_token_s=token_share * step_s * rng.uniform(0.5, 2.0),
    )


def _trace(rng: np.random.Generator, step_s: float) -> tuple[SimulatedRequest, ...]:
    """Log-normal lengths; Poisson or bursty arrivals at a rate that keeps 1.5 to 60 requests in flight with off."""
    n = TRACE_REQUESTS
    inputs = np.clip(rng.lognormal(np.log(rng.uniform(200, 1500)), rng.uniform(0.4, 0.9), n), 16, 8000).astype(int)
    outputs = np.clip(rng.lognormal(np.log(rng.uniform(100, 300)), rng.uniform(0.3, 0.7), n), 8, 1000).astype(int)
    in_flight = np.exp(rng.uniform(np.log(1.5), np.log(60)))
    gap_s = float(outputs.mean()) * step_s * (1 + in_flight / 60) / in_flight
    bursty = rng.random() < 0.5
    gaps = rng.gamma(0.15, gap_s / 0.15, n) if bursty else rng.exponential(gap_s, n)
    order = np.argsort(np.argsort(inputs)) * CONTEXTS // n
    shared = [tuple(range(1000 * p, 1000 * p + int(rng.integers(4, 24)))) for p in range(6)]  # system prompts
    with_prefix = rng.random(n) < 0.7
    return tuple(
        SimulatedRequest(
            float(arrival),
            int(inputs[i]),
            int(outputs[i]),
            _category(int(order[i]), i * PHASES // n),
            shared[int(rng.integers(len(shared)))][: inputs[i] // BLOCK_TOKENS] if with_prefix[i] else (),
        )
        for i, arrival in enumerate(np.cumsum(gaps))
    )


def _category(context: int, phase: int) -> str:
    return f"context{context}-phase{phase}"
