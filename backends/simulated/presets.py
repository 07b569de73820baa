"""Worlds by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from backends.simulated.world import Draft, Limits, TargetCost, World


def small() -> World:
    """A small invented engine for tests of the client: 8 ms steps, quick prefill."""
    rates = {"default": (0.7, 0.5, 0.35, 0.25), "code": (0.9, 0.8, 0.7, 0.6), "chat": (0.6, 0.35, 0.2, 0.1)}
    return World(
        name="small",
        note="Invented; resembles no machine.",
        target=TargetCost(fixed_s=0.002, weights_s=0.006, token_s=2e-5, prefill_token_s=5e-5, context_token_s=1e-9),
        drafts={
            "draft_model": Draft(position_rates=rates, dispersion=0.2, pass_s=0.0006, draft_token_s=2e-6),
            "ngram": Draft(
                position_rates={"default": (0.3, 0.25, 0.2, 0.15)}, dispersion=0.5, draft_rate=0.4, step_fixed_s=2e-4
            ),
        },
        limits=Limits(max_num_seqs=64, max_batched_tokens=2048, kv_capacity_tokens=200_000, max_model_len=16_384),
    )


PRESETS: Mapping[str, Callable[[], World]] = {"small": small}
