"""Waiting until an exact time. Timers of the event loop count in whole milliseconds; the kernel's timerfd does not.

Linux only (timerfd_create(2)); elsewhere the last millisecond of a wait is polled.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time

_CLOCK_MONOTONIC = 1  # what time.monotonic() reads
_NONBLOCK = 0o4000
_ABSOLUTE = 1
_POLL_S = 0.001


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval_s", ctypes.c_long), ("interval_ns", ctypes.c_long), ("s", ctypes.c_long), ("ns", ctypes.c_long))


_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


async def sleep_until(clock_s: float) -> None:
    """Return at a time of `time.monotonic()`, within some ten microseconds where the loop is free."""
    if clock_s <= time.monotonic():
        return
    if _LIBC is None:
        while (left := clock_s - time.monotonic()) > 0:
            await asyncio.sleep(left - _POLL_S if left > 2 * _POLL_S else 0)
        return
    fd = _LIBC.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "timerfd_create failed")
    loop = asyncio.get_running_loop()
    due = loop.create_future()
    try:
        whole = int(clock_s)
        when = _Itimerspec(0, 0, whole, max(1, int((clock_s - whole) * 1e9)))
        _LIBC.timerfd_settime(fd, _ABSOLUTE, ctypes.byref(when), None)
        loop.add_reader(fd, _fire, due)
        await due
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _fire(due: asyncio.Future[None]) -> None:
    if not due.done():
        due.set_result(None)
