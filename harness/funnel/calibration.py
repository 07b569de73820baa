"""What loads say beyond the fit: a Gaussian process over the logarithm of measured ÷ predicted time of a load.

The fit knows no CUDA-graph sizes, no preemption and no cache. Its errors resemble each other at neighbouring K and batch sizes of one
drafter, so a measured cell corrects its neighbours and leaves far cells as unsure as they were (kriging with the fit as the mean).
What all servers share at a batch size, such as too small a KV cache, is a component of its own, which cancels in a speed-up. How large
the errors are is taken from the loads themselves.

The machine may be slower for a while, which would look like a slow drafter. It then computes prompts slowly too, and those hardly
depend on the drafter. So TTFT is a second reading of each load, which shares with the first only the state of the machine, a process
in time. Two things are seldom and then large, and are Student t instead of normal (by iterated weights): a machine that a neighbour
slows down for minutes, and a TTFT that says nothing of the machine (a queue of prompts that the fit does not foresee).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from backends.types import ServingConfig
from harness.funnel.acceptance import draft_key
from harness.funnel.observation import Array, Observation
from harness.funnel.step_cost import StepCost

LEAST_SD = 0.04
"""Prior standard deviation of the fit's error at a cell, and of what all servers share; at least: the loads may raise it."""
K_SCALE, BATCH_SCALE = 2.0, 2.0  # in doublings of 1 + K and of the batch size
DRAFTER_SHARE, SERVER_SHARE, CELL_SHARE = 0.3, 0.2, 0.15
"""Of the prior variance: what all cells of a drafter share, what all batch sizes of a server share, what a cell has for itself (a
step that fits no captured CUDA graph, say)."""
SPLIT_SD = 0.15  # of the share of a draft's cost that is fixed, while only one K was measured where drafts show
MACHINE_SD, MACHINE_SCALE_S = 0.03, 400.0  # of the machine's speed, and how long it lasts
SERVER_SD, LOAD_SD = 0.007, 0.004  # of a server from start to start, and of a load on it beside its steps'
TTFT_SHAPE_SD, TTFT_DRAFT_SD = 0.15, 0.03  # errors of predicted TTFT that all servers share at a batch size, and of one drafter
TTFT_REQUEST_SD = 0.15  # of one request's TTFT, within what its lengths explain
MACHINE_FREEDOM, TTFT_FREEDOM = 2.0, 4.0  # degrees of freedom of the machine's state, and of a TTFT reading's error
ITERATIONS = 6

Cells = Sequence[tuple[ServingConfig, int]]


@dataclass(frozen=True, slots=True)
class Calibration:
    cells: Cells
    mean: Array  # log(true ÷ predicted time), by cell
    covariance: Array

    @property
    def rows(self) -> dict[tuple[ServingConfig, int], int]:
        return {cell: row for row, cell in enumerate(self.cells)}


def calibrate(cost: StepCost, loads: Sequence[Observation], ratios: Sequence[tuple[float, float]], cells: Cells) -> Calibration:
    """Posterior over `cells` given all loads of one group in the order they were measured.

    `ratios`: measured ÷ predicted of each load, all time and TTFT.
    """
    readings = np.log(np.array(ratios))
    seen = [(load.config, load.batch_size) for load in loads]
    common, own = _spread(readings[:, 0], [batch for _, batch in seen])
    prior = max(LEAST_SD, cost.error, own)
    context = float(np.mean([load.context_tokens for load in loads]))

    def covariance_of(a: Cells, b: Cells) -> Array:
        doubts = (np.array([cost.split_doubt(config, batch, context) for config, batch in cells]) for cells in (a, b))
        split = SPLIT_SD**2 * np.outer(*doubts) * _same_draft(a, b)
        return np.asarray(max(LEAST_SD, common) ** 2 * _near_batch(a, b) + prior**2 * _kernel(a, b) + split)

    times = np.cumsum([load.cost_s for load in loads])
    machine = MACHINE_SD**2 * np.exp(-np.abs(times[:, None] - times[None, :]) / MACHINE_SCALE_S)
    starts = np.cumsum([i > 0 and load.config != loads[i - 1].config for i, load in enumerate(loads)])
    server = SERVER_SD**2 * np.equal.outer(starts, starts)
    noise = LOAD_SD**2 + np.array([load.step_noise for load in loads])
    ttft_noise = 0.02**2 + TTFT_REQUEST_SD**2 / np.array([len(load.e2e_s) for load in loads])
    shape = max(TTFT_SHAPE_SD, float(np.sqrt(np.mean(readings[:, 1] ** 2))))
    ttft = shape**2 * _near_batch(seen, seen)
    ttft += TTFT_DRAFT_SD**2 * _same_draft(seen, seen)
    time = covariance_of(seen, seen) + server + np.diag(noise)
    both = readings.T.ravel()
    weights, calm = np.ones(len(loads)), np.ones(len(loads))
    for _ in range(ITERATIONS):
        ttft_error = np.diag(ttft_noise / weights)
        state = machine / np.sqrt(np.outer(calm, calm))
        factor = cho_factor(np.block([[time + state, state], [state, ttft + state + ttft_error]]))
        of_time, of_ttft = np.split(cho_solve(factor, both), 2)
        error, found = ttft_noise / weights * of_ttft, state @ (of_time + of_ttft)  # as they are expected now
        weights = (TTFT_FREEDOM + 1) / (TTFT_FREEDOM + error**2 / ttft_noise)
        calm = (MACHINE_FREEDOM + 1) / (MACHINE_FREEDOM + found**2 / MACHINE_SD**2)
    cross = np.hstack([covariance_of(cells, seen), np.zeros((len(cells), len(loads)))])
    return Calibration(
        cells,
        cross @ cho_solve(factor, both),
        covariance_of(cells, cells) - cross @ cho_solve(factor, cross.T),
    )


def _spread(readings: Array, batches: Sequence[int]) -> tuple[float, float]:
    """Root mean squares of the loads' errors: of what servers share at a batch size, and of what each has of its own."""
    sizes = np.array(batches)
    shared = np.array([readings[sizes == batch].mean() for batch in batches])
    return float(np.sqrt(np.mean(shared**2))), float(np.sqrt(np.mean((readings - shared) ** 2)))


def _near_batch(a: Cells, b: Cells) -> Array:
    first, second = (np.log2([float(batch) for _, batch in cells]) for cells in (a, b))
    return np.asarray(np.exp(-np.abs(first[:, None] - second[None, :]) / BATCH_SCALE))


def _same_draft(a: Cells, b: Cells) -> Array:
    """[a, b] whether two cells have the same drafter."""
    numbers: dict[object, int] = {}
    first, second = ([numbers.setdefault(draft_key(config), len(numbers)) for config, _ in cells] for cells in (a, b))
    return np.equal.outer(first, second)


def _kernel(a: Cells, b: Cells) -> Array:
    """Correlation of the fit's errors. Exponential in the doublings of K and batch: errors have steps, they are not smooth."""
    (k1, k2) = (np.log2([1.0 + config.k for config, _ in cells]) for cells in (a, b))
    near_k = np.exp(-np.abs(k1[:, None] - k2[None, :]) / K_SCALE)
    rest = 1 - DRAFTER_SHARE - SERVER_SHARE - CELL_SHARE
    near_batch = _near_batch(a, b)
    same_cell = (near_k == 1) & (near_batch == 1)
    return np.asarray(
        _same_draft(a, b) * (DRAFTER_SHARE + near_k * (SERVER_SHARE + rest * near_batch) + CELL_SHARE * same_cell)
    )
