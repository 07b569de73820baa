"""How unevenly requests gain from a drafter, from loads that are built to a truth."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.funnel.observation import Observation
from harness.funnel.unevenness import LEAST_PAIRS, stretched, unevenness
from tests.harness.funnel.loads import OFF, WORLD, observe, on

N = 60


def loads(speedups: NDArray[np.float64], tau: float) -> tuple[Observation, Observation]:
    """A load with those speed-ups of decoding by request, and off's; every request has 32 tokens at 10 ms."""
    off = replace(
        observe(OFF, 4, WORLD, N, seed=1),
        output_tokens=np.full(N, 33.0),
        ttft_s=np.full(N, 0.1),
        e2e_s=np.full(N, 0.1 + 0.32),
    )
    return replace(off, config=on("ngram", 4), tau=tau, e2e_s=0.1 + 0.32 / speedups), off


def test_a_drafter_that_serves_all_alike_is_even() -> None:
    load, off = loads(np.full(N, 1.8), 2.0)
    assert unevenness([load], [off]) == pytest.approx(np.zeros(N))


def test_a_few_requests_that_copy_show_in_the_median_and_not_in_the_sum() -> None:
    speedups = np.where(np.arange(N) < N // 4, 4.0, 1.0)
    load, off = loads(speedups, 1.5)
    uneven = unevenness([load], [off])
    decode_s = np.full(100, 0.2)  # as virtual time has it: the same for all
    found = stretched(decode_s, uneven, math.log(1.5))
    assert found.mean() == pytest.approx(0.2)
    assert np.median(found) / found.min() == pytest.approx(4.0)
    assert np.median(found) == pytest.approx(0.2 / (0.75 + 0.25 / 4))  # three of four are not sped up at all


def test_more_tau_spreads_requests_more() -> None:
    load, off = loads(np.where(np.arange(N) % 2 == 0, 2.0, 1.0), 1.5)
    uneven = unevenness([load], [off])
    narrow, wide = (np.ptp(np.log(stretched(np.ones(1), uneven, math.log(tau)))) for tau in (1.5, 1.5**2))
    assert wide == pytest.approx(2 * narrow)


def test_what_does_not_draft_or_shares_too_few_requests_says_nothing() -> None:
    load, off = loads(np.linspace(1.0, 2.0, N), 1.5)
    assert len(unevenness([replace(load, tau=1.01)], [off])) == 0
    assert len(unevenness([load], [replace(off, batch_size=8)])) == 0
    few = replace(load, requests=tuple(range(1000, 1000 + N - LEAST_PAIRS + 1)) + load.requests[: LEAST_PAIRS - 1])
    assert len(unevenness([few], [off])) == 0
    assert stretched(np.array([0.1, 0.3]), np.zeros(0), 0.5).tolist() == [[0.1], [0.3]]
