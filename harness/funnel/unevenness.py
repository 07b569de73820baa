"""How unevenly requests gain from one drafter. Text that copies its prompt gains much and other text little, so that the median request
gains less than all time together does, and less of n-gram than of a head that gains the same."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from harness.funnel.observation import Array, Observation

LEAST_PAIRS = 8
LEAST_LOG_TAU = 0.05
"""A load below this says how its noise is spread, not what the drafter gains."""


def unevenness(loads: Sequence[Observation], offs: Sequence[Observation]) -> Array:
    """Of every request of one drafter's `loads` that off decoded too, at the same batch size: the log of (time per token with off ÷ with
    the draft) less that of all of the load together, for a drafter with log τ = 1: more τ spreads requests in proportion."""
    found = []
    for load in loads:
        log_tau = math.log(load.tau)
        plain = _off_of(load, offs)
        if plain is None or log_tau < LEAST_LOG_TAU:
            continue
        places = {request: i for i, request in enumerate(plain.requests)}
        pairs = [(i, places[request]) for i, request in enumerate(load.requests) if request in places]
        if len(pairs) >= LEAST_PAIRS:
            mine, theirs = np.array(pairs).T
            gains = np.log(_tpot_s(plain)[theirs] / _tpot_s(load)[mine])
            decode_s = (plain.e2e_s - plain.ttft_s)[theirs]
            together = -math.log(float(np.average(np.exp(-gains), weights=decode_s)))
            found.append((gains - together) / log_tau)
    return np.concatenate(found) if found else np.zeros(0)


def stretched(decode_s: Array, uneven: Array, reach: float) -> Array:
    """Decode times [n] as requests with each of the deviations [m] times `reach` would have them, [n, m], the sum of all as before."""
    factors = np.exp(-uneven * reach) if len(uneven) else np.ones(1)
    return np.asarray(np.outer(decode_s, factors / factors.mean()))


def _off_of(load: Observation, offs: Sequence[Observation]) -> Observation | None:
    """The load of off at the same batch size that shares most requests with `load`."""
    here = [off for off in offs if (off.batch_size, off.workload) == (load.batch_size, load.workload)]
    return max(here, key=lambda off: len(set(off.requests) & set(load.requests)), default=None)


def _tpot_s(load: Observation) -> Array:
    return np.asarray((load.e2e_s - load.ttft_s) / np.maximum(load.output_tokens - 1, 1))
