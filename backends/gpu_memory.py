"""How much GPU memory is in use, so that no engine starts while an earlier one still holds some."""

from __future__ import annotations

import time

from backends.gpus import visible_handles

SLACK_BYTES = 256 << 20  # other processes (a display, a monitor) move by less than this
POLL_S = 0.25


def used_bytes() -> tuple[int, ...]:
    """Bytes in use on each GPU that is ours; empty where there is none or its driver does not answer."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in visible_handles(pynvml))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def wait_released(level: tuple[int, ...], timeout_s: float = 30.0) -> str | None:
    """Wait until no GPU uses more than `level` (plus slack). One line that names the GPU if that does not happen in time."""
    deadline = time.monotonic() + timeout_s
    while level:
        over = [
            (i, now - was) for i, (now, was) in enumerate(zip(used_bytes(), level, strict=False)) if now > was + SLACK_BYTES
        ]
        if not over:
            return None
        if time.monotonic() >= deadline:
            index, excess = over[0]
            return f"GPU {index} holds {excess / 2**30:.1f} GiB more than before the start, {timeout_s:.0f} s after its end"
        time.sleep(POLL_S)
    return None
