"""Where a step's time goes, and a log of steps for those who want to see it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Literal

import torch

from backends.types import ConfigError

Part = Literal["draft", "verify", "sample", "host"]
PARTS: tuple[Part, ...] = ("draft", "verify", "sample", "host")


class StepClock:
    """Seconds by part: `draft` is the drafter, `verify` the target's pass with its LM head, `sample` the choice of tokens and the
    walk down the drafts, `host` the rest (scheduling, text, counting)."""

    def __init__(self, device: torch.device, log: Path | None) -> None:
        """Raises ConfigError where the log cannot be written."""
        self.recording = True  # False: steps leave no trace
        self.totals: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._parts = dict(self.totals)
        self._cuda = device if device.type == "cuda" and log is not None else None
        try:
            self._log = log.open("a", buffering=1) if log is not None else None
        except OSError as error:
            raise ConfigError(f"--step-log {log} cannot be written: {error.strerror}") from None
        self._last = 0.0

    def start(self) -> None:
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._last = time.perf_counter()

    def lap(self, part: Part) -> None:
        """The time since the last call was `part`'s. With a log on a GPU this waits for it; without one only sums are off."""
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
        now = time.perf_counter()
        self._parts[part] += now - self._last
        self._last = now

    def finish(self, **counts: int) -> None:
        """End of a step of these counts."""
        if not self.recording:
            return
        for part, seconds in self._parts.items():
            self.totals[part] += seconds
        if self._log is not None:
            times = {f"{part}_s": round(value, 7) for part, value in self._parts.items()}
            self._log.write(json.dumps({**counts, "step_s": round(sum(self._parts.values()), 7), **times}) + "\n")
