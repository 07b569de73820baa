"""What the funnel compares configurations by: the mean log speed-up over the traces' batch sizes, with its uncertainty."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm

from backends.types import ServingConfig
from harness.funnel.acceptance import PARALLEL_SD, Curve, DraftKey, draft_key, is_chain
from harness.funnel.calibration import Calibration
from harness.funnel.observation import Array, Observation, Workload
from harness.funnel.prediction import Grid

Curves = Mapping[tuple[DraftKey, str], Curve]  # by drafter and workload


@dataclass(frozen=True, slots=True)
class Scores:
    """A joint normal distribution of the log speed-ups of `configs` over off; off is among them with 0."""

    configs: tuple[ServingConfig, ...]
    mean: Array
    covariance: Array

    def of(self, config: ServingConfig) -> tuple[float, float]:
        """Mean and standard deviation."""
        i = self.configs.index(config)
        return float(self.mean[i]), math.sqrt(self.covariance[i, i])

    def expected_gain(self, over: ServingConfig, margin: float) -> Array:
        """E[max(0, score − score of `over` − `margin`)] for every configuration, in log speed-up."""
        i = self.configs.index(over)
        difference = self.mean - self.mean[i] - margin
        variance = np.diag(self.covariance) + self.covariance[i, i] - 2 * self.covariance[i]
        sd = np.sqrt(np.maximum(variance, 1e-12))
        z = difference / sd
        gain = sd * (z * norm.cdf(z) + norm.pdf(z))
        gain[i] = 0.0
        return np.asarray(gain)


def score(
    grid: Grid,
    calibration: Calibration,
    workloads: Sequence[Workload],
    off: ServingConfig,
    curves: Curves,
    loads: Sequence[Observation],
    objective: str,
) -> Scores:
    """Predictions corrected by the calibration. Longer steps stretch every objective alike."""
    configs = tuple(dict.fromkeys(config for config, _, _ in grid))
    base = np.zeros(len(configs))
    weights = np.zeros((len(configs), len(calibration.cells)))
    rows = calibration.rows
    for i, config in enumerate(configs):
        for workload in workloads:
            for batch, share in workload.weights.items():
                if share <= 0 or config == off or (config, batch, workload.name) not in grid:
                    continue
                part = share / len(workloads)
                on, plain = grid[config, batch, workload.name], grid[off, batch, workload.name]
                base[i] += part * math.log(plain.objective(objective) / on.objective(objective))
                weights[i, rows[config, batch]] -= part
                weights[i, rows[off, batch]] += part
    mean = base + weights @ calibration.mean
    covariance = weights @ calibration.covariance @ weights.T
    return Scores(configs, mean, covariance + _acceptance_covariance(configs, workloads, curves, loads))


def _acceptance_covariance(
    configs: Sequence[ServingConfig], workloads: Sequence[Workload], curves: Curves, loads: Sequence[Observation]
) -> Array:
    """An error of τ is an error of the speed-up, shared by all K of one drafter; for trees and parallel drafters more, far from
    the K that were measured."""
    shared, own = np.zeros(len(configs)), np.zeros(len(configs))
    for i, config in enumerate(configs):
        if not config.k:
            continue
        measured = [load.config.k for load in loads if draft_key(load.config) == draft_key(config)]
        if not is_chain(config) and measured:
            own[i] = PARALLEL_SD * min(abs(math.log2(config.k / k)) for k in measured)
        for workload in workloads:
            tau = curves[draft_key(config), workload.name].tau(config.k)
            if tau.ci95:
                shared[i] += (tau.ci95[1] - tau.ci95[0]) / (2 * 1.96 * tau.value) / len(workloads)
    keys = [draft_key(config) for config in configs]
    same = np.array([[a == b for b in keys] for a in keys])
    return np.where(same, np.outer(shared, shared), 0.0) + np.diag(own**2)
