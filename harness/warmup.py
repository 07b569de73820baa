"""Warm-up: the server is brought to the state it will be measured in, at the trial's own concurrency and shapes.

Engines compile on first use, also on the first batch of a size (reports of first requests 25 times slower than later ones), so
one request at a time does not warm a batch. Rule: waves of requests at the trial's concurrency, each shortened to
`WAVE_TOKENS`, until a wave's mean time between chunks is no faster than `FASTER` times the fastest wave before it and no slower than
`SLOWER` times; at most `MAX_WAVES`. A server that warms up becomes faster, and one that compiles for a new shape much slower; in
between lies the noise of a few short requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

from backends.types import Endpoint
from harness.client import ReplayOptions, call_of, unseen
from harness.replay import Sender
from harness.types import Load, RequestRecord
from harness.wire import Origin, Pool, get
from workloads.types import Request

WAVE_TOKENS = 16
FASTER, SLOWER = 0.9, 1.3
SAME_STEP_S = 1e-4  # steps that differ by less are equal: chunks of such steps arrive in one read
MAX_WAVES = 6
OPEN_LOOP_CONCURRENCY = 4  # an open loop has no concurrency of its own; two and more at once meet the batched kernels

RESET_PATHS = {
    "reference": "/reset_prefix_cache",
    "simulated": "/reset_prefix_cache",
    "sglang": "/flush_cache",
    "vllm": "/reset_prefix_cache",
}
"""POST that empties the prefix cache, where a server offers it (vLLM: in its development mode only)."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """How a warm-up went."""

    step_s: tuple[float, ...]  # mean time of an engine step in each wave
    stable: bool
    prefix_cache: str  # cold (emptied), as found
    warnings: tuple[str, ...] = ()


async def warm_up(endpoint: Endpoint, requests: Sequence[Request], load: Load, options: ReplayOptions) -> WarmUp:
    """Warm the server for this load; none of the load's own prompts is sent.

    Raises:
        WorkloadError, ConfigError: as `replay`.
    """
    users = load.concurrency or min(OPEN_LOOP_CONCURRENCY, len(requests))
    pool = Pool(Origin.of(endpoint.base_url))
    sender = Sender(endpoint, options, pool, uuid4().hex[:12])
    waves: list[float] = []
    stable = False
    try:
        while len(waves) < MAX_WAVES and not stable:
            step_s = _step_s(await _wave(sender, requests, users, len(waves)))
            if step_s is None:
                break
            stable = is_stable(step_s, waves)
            waves.append(step_s)
        emptied = options.prefix_cache == "cold" and await empty_prefix_cache(endpoint)
    finally:
        pool.close()
    warnings = []
    if not stable:
        listed = ", ".join(f"{value * 1e3:.1f}" for value in waves) or "none"
        warnings.append(f"warm-up did not become stable: ms per step of its waves: {listed}")
    if options.prefix_cache == "cold" and not emptied:
        warnings.append("the server's prefix cache could not be emptied before the load; it holds what earlier loads left")
    return WarmUp(tuple(waves), stable, "cold" if emptied else "as found", tuple(warnings))


def is_stable(step_s: float, before: Sequence[float]) -> bool:
    """Whether a wave of steps of `step_s` seconds, after waves of `before`, is the last one needed."""
    if not before:
        return False
    best = min(before)
    return abs(step_s - best) <= SAME_STEP_S or FASTER * best <= step_s <= SLOWER * best


async def _wave(sender: Sender, requests: Sequence[Request], users: int, wave: int) -> list[RequestRecord]:
    async def one(user: int) -> RequestRecord:
        request = unseen(requests[(wave * users + user) % len(requests)], f"{sender.run_id}/{wave}/{user}")
        call = call_of(request, sender.endpoint, sender.options).shortened(WAVE_TOKENS)
        return await sender.perform(call, sender.render(call, f"-warm{wave}-{user}"), asyncio.get_running_loop().time())

    return list(await asyncio.gather(*(one(user) for user in range(users))))


def _step_s(records: Sequence[RequestRecord]) -> float | None:
    """Mean gap of the chunks of a wave, each of which is an engine step; the lengths of prompts do not enter."""
    done = [r.chunk_s for r in records if r.status == "completed" and len(r.chunk_s) > 1]
    if not done:
        return None
    return sum(times[-1] - times[0] for times in done) / sum(len(times) - 1 for times in done)


async def empty_prefix_cache(endpoint: Endpoint) -> bool:
    """Ask the server to empty its prefix cache; whether it did."""
    path = RESET_PATHS.get(endpoint.backend)
    if path is None:
        return False
    pool = Pool(Origin.of(endpoint.base_url))
    try:
        return await get(pool, path, method="POST") is not None
    finally:
        pool.close()
