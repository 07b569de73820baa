"""What a person sees while a run works: stage, trial, time left, best so far. Plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class RunProgress:
    """Progress of one run: `total` loads to measure, one `step` each.

    Time left is the mean time of the loads measured so far times those to come, so it is shown from the second one on.
    """

    def __init__(self, total: int = 0, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._total = total
        self._done = 0
        self._spent_s = 0.0
        self._best = ""
        self._stage = ""
        self._bar: Progress | None = None
        if self.console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                TextColumn("[green]{task.fields[best]}"),
                console=self.console,
            )
            self._task = self._bar.add_task("starting", total=total, left="", best="")
            self._bar.start()

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def stage(self, name: str) -> None:
        self._stage = name
        self._update(name)

    def expect(self, total: int) -> None:
        """The number of loads to measure is now known better."""
        self._total = total
        self._update(self._stage)

    def note(self, text: str) -> None:
        """One line that stays."""
        if self._bar:
            self.console.print(text, markup=False, highlight=False)
        else:
            print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)

    def begin(self, what: str) -> None:
        if self._bar:
            self._update(f"{self._stage}: {what}")
        else:
            self.note(f"{self._stage} {self._done + 1}/{max(self._total, self._done + 1)}: {what}{self._left()}")

    def step(self, summary: str, seconds: float) -> None:
        self._done += 1
        self._spent_s += seconds
        self.note(f"  {summary}")
        self._update(self._stage)

    def best(self, text: str) -> None:
        if text != self._best:
            self._best = text
            self._update(self._stage)
            if not self._bar:
                self.note(f"  best so far: {text}")

    def _left(self) -> str:
        if not self._spent_s or self._done >= self._total:
            return ""
        seconds = self._spent_s / self._done * (self._total - self._done)
        return f", about {_duration(seconds)} left"

    def _update(self, description: str) -> None:
        if self._bar:
            self._bar.update(
                self._task,
                description=description,
                completed=self._done,
                total=max(self._total, self._done),
                left=self._left().lstrip(", "),
                best=self._best,
            )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
