"""One closed-loop load in virtual time, with the lead-in and lead-out of the real one (`harness.replay`): all that is measured ran at
full concurrency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from backends.simulated.virtual import SimulatedRequest, simulate
from backends.simulated.world import World
from backends.types import SpecCounters
from harness.funnel.observation import Array


@dataclass(frozen=True, slots=True)
class VirtualLoad:
    """Arrays are [n], one entry for each measured request; the lead-in and lead-out are in `wall_s` and `counters` alone."""

    ttft_s: Array
    e2e_s: Array
    output_tokens: Array
    steps: Array  # decode steps
    counters: SpecCounters
    wall_s: float

    @property
    def tpot_s(self) -> Array:
        """NaN for one token."""
        return (self.e2e_s - self.ttft_s) / np.where(self.output_tokens > 1, self.output_tokens - 1, np.nan)


def closed_loop(
    world: World,
    requests: Sequence[SimulatedRequest],
    *,
    variant: str,
    k: int,
    concurrency: int,
    seed: int = 0,
    luck: bool = True,
) -> VirtualLoad:
    """Send `requests`, `concurrency` at a time; `luck` as in `simulate`."""
    leads = [requests[i % len(requests)] for i in range(concurrency)]
    lead_in = [
        replace(request, prefix=(), output_tokens=max(1, round(request.output_tokens * (i + 1) / concurrency)))
        for i, request in enumerate(leads)
    ]
    lead_out = [replace(request, prefix=()) for request in leads[: concurrency - 1]]
    run = simulate(world, [*lead_in, *requests, *lead_out], variant=variant, k=k, concurrency=concurrency, seed=seed, luck=luck)
    measured = slice(len(lead_in), len(lead_in) + len(requests))
    return VirtualLoad(
        ttft_s=run.ttft_s[measured],
        e2e_s=run.e2e_s[measured],
        output_tokens=run.output_tokens[measured].astype(float),
        steps=run.decode_steps[measured].astype(float),
        counters=run.counters,
        wall_s=float(run.last_token_s.max()),
    )
