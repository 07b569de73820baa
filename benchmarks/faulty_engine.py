"""The reference engine with a fault built in, to see whether a gate finds it.

    --engine "reference=python benchmarks/faulty_engine.py --slow-step 0.08"     every step takes 8 % longer
    --engine "reference=python benchmarks/faulty_engine.py --spoil-drafts 0.3"   3 of 10 drafts are replaced: tau falls, text stays

It takes the place of the Python interpreter: what follows its own options is the engine's command line.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace
from typing import Any

from backends.reference import __main__ as engine_main
from backends.reference.engine import Engine


def slow_step(share: float) -> None:
    """Make every step longer by `share` of its own time, busy as a slower kernel would be."""
    original = Engine.step

    def step(self: Engine) -> Any:
        begun = time.perf_counter()
        found = original(self)
        until = begun + (time.perf_counter() - begun) * (1 + share)
        while time.perf_counter() < until:
            pass
        return found

    Engine.step = step  # type: ignore[method-assign]


def spoil_drafts(share: float) -> None:
    """Replace the tokens of this share of all drafts by token 0, which greedy text hardly ever holds."""
    original = Engine.__init__
    luck = random.Random(0)

    def init(self: Engine, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        propose = self.drafter.propose

        def spoiled(rows: Any) -> Any:
            return [
                replace(draft, tokens=type(draft.tokens)([0] * len(draft.tokens))) if luck.random() < share else draft
                for draft in propose(rows)
            ]

        self.drafter.propose = spoiled  # type: ignore[method-assign]

    Engine.__init__ = init  # type: ignore[method-assign]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow-step", type=float, default=0.0, help="share of a step's time added to it")
    parser.add_argument("--spoil-drafts", type=float, default=0.0, help="share of drafts replaced")
    faults, rest = parser.parse_known_args()
    if faults.slow_step:
        slow_step(faults.slow_step)
    if faults.spoil_drafts:
        spoil_drafts(faults.spoil_drafts)
    engine_main.main(rest[rest.index("backends.reference") + 1 :])
