"""What the funnel reads of a measurement: one closed-loop load on one server, over HTTP or in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backends.types import ServingConfig

Array = NDArray[np.float64]
STEP_SD = 0.3
"""Relative standard deviation of one engine step's time."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Arrays are [n], one entry for each completed request."""

    config: ServingConfig
    batch_size: int  # concurrency of the closed loop
    workload: str  # name of the trace
    requests: tuple[int, ...]  # positions in the trace
    input_tokens: Array
    output_tokens: Array
    ttft_s: Array
    e2e_s: Array
    tau: float
    position_rates: tuple[float, ...]  # marginal, over all decode steps
    drafted_share: float  # decode steps with a draft ÷ all decode steps
    prefix_hit_rate: float  # prompt tokens that came from the prefix cache ÷ all
    cost_s: float  # what it took, a server start included

    @property
    def decode_steps(self) -> float:
        """Steps of all sequences after their first tokens."""
        return float((self.output_tokens - 1).sum() / self.tau)

    @property
    def step_s(self) -> float:
        """Mean time from one step of a sequence to its next, prefill of others in between included."""
        return float((self.e2e_s - self.ttft_s).sum() / self.decode_steps)

    @property
    def busy_s(self) -> float:
        """How long all slots were busy with these requests."""
        return float(self.e2e_s.sum()) / self.batch_size

    @property
    def mean_batch(self) -> float:
        """Sequences that decode at once: the slots less those that wait for their first token (Little's law, all slots busy)."""
        return float(self.batch_size * (self.e2e_s - self.ttft_s).sum() / self.e2e_s.sum())

    @property
    def step_noise(self) -> float:
        """Variance of the load's relative time by its engine steps' own, stalls included: all requests of a load share them."""
        return STEP_SD**2 * self.mean_batch / max(self.decode_steps, 1.0)

    @property
    def prefill_tokens_per_step(self) -> float:
        """Prompt tokens computed beside one decode step of the engine."""
        return float(self.prefill_tokens.sum()) * self.mean_batch / self.decode_steps

    @property
    def prefill_tokens(self) -> Array:
        """Prompt tokens that were computed, one at least: the last position's logits are needed."""
        return np.asarray(np.maximum(self.input_tokens * (1 - self.prefix_hit_rate), 1.0))

    @property
    def context_tokens(self) -> float:
        """Mean context of a decoding sequence, over its decode time."""
        middle = self.input_tokens + self.output_tokens / 2
        return float((middle * self.output_tokens).sum() / self.output_tokens.sum())


@dataclass(frozen=True, slots=True)
class Workload:
    """One trace as the prediction sees it: lengths of requests that off answered, and how much each batch size counts."""

    name: str
    input_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    prefix_hit_rate: float  # with off
    weights: Mapping[int, float]  # measured batch size -> share of the trace's decode time near it; sums to 1


Measure = Callable[[ServingConfig, int, str, int], Mapping[str, Observation] | None]
"""measure(config, batch_size, stage, requests): that many requests of every workload, by its name; None where one failed.

Equal arguments give the same requests, and at one batch size fewer requests are a part of more, so that loads of two servers are
paired.
"""
