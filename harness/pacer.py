"""Waiting until an exact time: the event loop's timers count in whole milliseconds, so the end of a wait is polled."""

from __future__ import annotations

import asyncio
import time

_POLL_S = 0.0001  # a timer is up to half a millisecond late, which is little; polling costs the core that reads answers


async def sleep_until(clock_s: float) -> None:
    """Return at a time of `time.monotonic()`, within half a millisecond where the loop is free."""
    while (left := clock_s - time.monotonic()) > 0:
        await asyncio.sleep(left - _POLL_S if left > _POLL_S else 0)
