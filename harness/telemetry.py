"""What a server says of itself while a load runs: counts before and after, queue lengths in between."""

from __future__ import annotations

import asyncio
import re
import time

from backends.counters import DIALECTS, parse_metrics
from backends.types import Endpoint, Gauges, SpecCounters
from harness.wire import Pool, get

SAMPLE_PERIOD_S = 0.2
SETTLE_S = 2.0  # longest wait for a drained server to publish its last counts

# A page of vLLM has a thousand lines; parsing all of them five times a second would delay the time stamps of the load.
_SAMPLED = re.compile(
    r"^[a-z_]*:?[a-z_]*(?:running|waiting|queue_req|kv_use|kv_cache_us|token_usage|kv_cache_util"
    r"|generat[a-z]+_tokens_total|process_start_time).*$",
    re.MULTILINE,
)

PAGES = {"tensorrt_llm": "/prometheus/metrics"}  # its /metrics is emptied by reading


class Telemetry:
    """Reads the statistics page of one server over its own connection."""

    def __init__(self, endpoint: Endpoint, pool: Pool) -> None:
        self._backend = endpoint.backend
        self._path = PAGES.get(endpoint.backend, "/metrics")
        self._pool = pool
        self.samples: list[tuple[float, Gauges]] = []  # (clock time, reading)
        self.broken: str | None = None  # why the counts of this load cannot be used

    def close(self) -> None:
        self._pool.close()

    async def read(self) -> tuple[SpecCounters, Gauges] | None:
        """The whole page; None where there is none, or nobody knows how to read it."""
        if self._backend not in DIALECTS:
            return None
        page = await get(self._pool, self._path)
        return None if page is None else parse_metrics(self._backend, page)

    async def settled(self) -> tuple[SpecCounters, Gauges] | None:
        """The page once the server has nothing left to run; some counts move only when a request ends."""
        give_up = time.monotonic() + SETTLE_S
        earlier = None
        while True:
            found = await self.read()
            if found is None or (found == earlier and not found[1].running) or time.monotonic() > give_up:
                return found
            earlier = found
            await asyncio.sleep(0.05)

    async def sample(self) -> None:
        """Read gauges until cancelled, and watch that no counter falls: a reset in the middle may not show at the end."""
        if self._backend not in DIALECTS:
            return
        earlier = SpecCounters()
        while True:
            page = await get(self._pool, self._path)
            if page is None:
                return
            counters, gauges = parse_metrics(self._backend, "\n".join(_SAMPLED.findall(page)))
            self.samples.append((time.monotonic(), gauges))
            try:
                _ = counters - earlier
            except ValueError as error:
                self.broken = self.broken or str(error)
            earlier = counters
            await asyncio.sleep(SAMPLE_PERIOD_S)
