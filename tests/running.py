"""Runs that tests interrupt."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any


def wait_until(reached: Callable[[], bool], run: subprocess.Popen[Any], timeout_s: float) -> None:
    """Until `run` has come so far, while it still runs."""
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert run.poll() is None, "the run ended before it could be interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.05)
