"""Blocks with known content for the tests of the gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from harness.gate.types import Block, Sample

BASE: Mapping[str, float] = {
    "tau@8": 3.1,
    "position_1@8": 0.85,
    "step@8": 0.040,
    "e2e_p50@8": 0.72,
    "tpot_p50@8": 0.0129,
    "ttft_p50@8": 0.120,
    "throughput@8": 530.0,
    "batch@8": 7.8,
}
TIMES = ("step@8", "e2e_p50@8", "tpot_p50@8", "ttft_p50@8")


def turn(factor: float = 1.0, **changed: float) -> Sample:
    """A sample whose times are `factor` times the base; `changed` names metrics (without @8) with their own factor."""
    values = {key: value * (factor if key in TIMES else 1.0) for key, value in BASE.items()}
    values["throughput@8"] /= factor
    for name, ratio in changed.items():
        values[f"{name}@8"] *= ratio
    return Sample(values, requests=16)


def blocks(count: int, *, slow: float = 1.0, noise: float = 0.0, seed: int = 0, **changed: float) -> list[Block]:
    """`count` blocks whose candidate is `slow` times slower, each turn with log-normal noise of its own."""
    rng = np.random.default_rng(seed)

    def noisy(factor: float, **own: float) -> Sample:
        return turn(factor * float(np.exp(noise * rng.standard_normal())), **own)

    return [Block((noisy(1), noisy(1)), (noisy(slow, **changed), noisy(slow, **changed))) for _ in range(count)]


class ListSource:
    """Blocks from a list, each taking `block_s` seconds."""

    def __init__(self, found: Sequence[Block], block_s: float = 10.0) -> None:
        self.found = found
        self.block_s = block_s
        self.given = 0

    def block(self, number: int) -> Block:
        assert number == self.given
        self.given += 1
        return self.found[number]

    def elapsed_s(self) -> float:
        return self.given * self.block_s
