"""Capacity: every number here can be worked out by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.simulated.virtual import SimulatedRequest, SimulatedRun, simulate
from backends.simulated.world import Limits, TargetCost, World
from backends.types import ServingConfig
from harness.capacity import (
    REPLAYS,
    STEP,
    OpenLoop,
    Point,
    bracket,
    ceiling,
    demand,
    fleet,
    is_saturated,
    next_rate,
    usd_per_million_tokens,
)
from harness.provision import open_loops
from harness.store import Trial
from harness.types import CAPACITY_STAGE, Load

SLO = {"tpot_p95": 0.040, "ttft_p95": 0.5}


def point(concurrency: int, rps: float, tpot: float, ttft: float = 0.1) -> Point:
    return Point(concurrency, rps, rps * 50, {"tpot_p95": tpot, "ttft_p95": ttft})


def test_the_ceiling_lies_between_what_passed_and_what_failed() -> None:
    found = ceiling([point(1, 1.0, 0.020), point(16, 4.0, 0.060), point(4, 3.0, 0.030)], SLO)
    assert (found.passing_rps, found.passing_concurrency, found.passing_tokens_per_s) == (3.0, 4, 150.0)
    assert (found.failing_rps, found.failing_concurrency, found.limited_by) == (4.0, 16, "tpot_p95")
    assert found.between_rps == pytest.approx(3.0 + 1 / 3)  # 40 ms is a third of the way from 30 to 60


def test_a_loop_above_a_failing_one_does_not_count_even_if_it_passes_by_chance() -> None:
    found = ceiling([point(1, 1.0, 0.02), point(4, 3.0, 0.05), point(16, 4.0, 0.03)], SLO)
    assert found.passing_rps == 1.0


def test_where_all_pass_the_ceiling_is_at_least_the_highest_and_where_none_does_there_is_none() -> None:
    open_ended = ceiling([point(1, 1.0, 0.02), point(4, 3.0, 0.03)], SLO)
    assert (open_ended.passing_rps, open_ended.failing_rps, open_ended.between_rps) == (3.0, None, None)
    nothing = ceiling([point(1, 1.0, 0.05), point(4, 3.0, 0.06)], SLO)
    assert (nothing.passing_rps, nothing.failing_rps, nothing.between_rps) == (None, 1.0, None)


def test_a_latency_that_is_not_known_meets_no_limit() -> None:
    assert Point(1, 1.0, 50.0, {"tpot_p95": None, "ttft_p95": 0.1}).broken(SLO) == ["tpot_p95"]


def test_without_limits_the_highest_measured_rate_is_the_ceiling() -> None:
    assert ceiling([point(1, 1.0, 9.0), point(4, 3.0, 9.0), point(16, 2.9, 9.0)], {}).passing_rps == 3.0
    assert is_saturated([point(1, 1.0, 0.1), point(4, 3.0, 0.1), point(16, 3.1, 0.1)])
    assert not is_saturated([point(1, 1.0, 0.1), point(4, 3.0, 0.1)])


def test_demand_finds_the_busiest_minute_wherever_it_begins() -> None:
    # one a second for ten minutes, and 60 more between 90 s and 150 s: that minute has 120
    steady, burst = np.arange(0, 600.0), np.arange(90, 150.0)
    found = demand(np.concatenate([steady, burst]))
    assert found is not None
    assert found.peak_minute_rps == 2.0
    assert found.mean_rps == pytest.approx(659 / 599)
    assert 1.0 <= found.p95_minute_rps <= 2.0
    double = found.at(0.5)
    assert (double.peak_minute_rps, double.minutes) == (4.0, found.minutes / 2)


def test_a_trace_under_a_minute_has_one_rate_and_one_without_a_span_none() -> None:
    found = demand(np.array([0.0, 10.0, 20.0, np.nan]))
    assert found is not None
    assert found.mean_rps == found.p95_minute_rps == found.peak_minute_rps == pytest.approx(0.1)
    assert demand(np.array([1.0, 1.0])) is None
    assert demand(np.array([])) is None


def test_replicas_headroom_and_price() -> None:
    needed = demand(np.arange(0, 600.0))  # one a second
    assert needed is not None
    rows = {row.time_scale: row for row in fleet(needed, 0.4, usd_per_replica_hour=2.5)}
    assert rows[1.0].replicas_peak == 3  # 1 / 0.4 = 2.5
    assert rows[1.0].headroom == pytest.approx(1 - 1 / 1.2)
    assert rows[1.0].usd_per_hour == 7.5
    assert (rows[0.5].replicas_peak, rows[4.0].replicas_peak) == (5, 1)
    assert {row.replicas_peak for row in fleet(needed, None, usd_per_replica_hour=1.0)} == {None}


def test_a_million_tokens_at_a_thousand_a_second_take_a_thousand_seconds() -> None:
    assert usd_per_million_tokens(1000.0, 3.6) == pytest.approx(1.0)
    assert usd_per_million_tokens(None, 3.6) is None
    assert usd_per_million_tokens(1000.0, None) is None


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 3600), min_size=2, max_size=200),
    st.floats(0.01, 100),
)
def test_a_fleet_always_carries_its_busiest_minute_and_one_replica_fewer_would_not(arrivals: list[int], rps: float) -> None:
    needed = demand(np.asarray(arrivals, dtype=float))
    if needed is None or not math.isfinite(needed.peak_minute_rps):
        return
    for row in fleet(needed, rps, usd_per_replica_hour=None):
        assert row.replicas_peak is not None
        assert row.replicas_p95 is not None
        assert row.replicas_peak * rps >= row.peak_minute_rps * (1 - 1e-6)
        assert (row.replicas_peak - 1) * rps < row.peak_minute_rps
        assert row.replicas_p95 <= row.replicas_peak


WORLD = World("engine", TargetCost(0.004, 0.010, 0.0004, 0.00002), limits=Limits(max_num_seqs=64))
"""A step takes 14 ms and 0.4 ms for each sequence: 16 sequences decode at 20.4 ms a token."""


def asked(n: int, arrivals: np.ndarray | None = None) -> list[SimulatedRequest]:
    times = np.zeros(n) if arrivals is None else arrivals
    return [SimulatedRequest(float(at), 100, 60) for at in times]


def p95(run: SimulatedRun) -> float:
    return float(np.quantile(run.tpot_s, 0.95))


def test_replays_below_what_passed_meet_the_limit_and_above_what_failed_break_it() -> None:
    points = []
    for concurrency in (1, 4, 16, 32):
        run = simulate(WORLD, asked(20 * concurrency), concurrency=concurrency)
        rate = concurrency / float(run.e2e_s.mean())
        points.append(Point(concurrency, rate, rate * 60, {"tpot_p95": p95(run)}))
    limit = {"tpot_p95": 0.0215}
    found = ceiling(points, limit)
    assert (found.passing_concurrency, found.failing_concurrency) == (16, 32)
    assert found.passing_rps is not None
    assert found.failing_rps is not None
    rng = np.random.default_rng(0)
    for rate, passes in ((0.7 * found.passing_rps, True), (1.1 * found.failing_rps, False)):
        arrivals = np.cumsum(rng.exponential(1 / rate, size=600))
        assert (p95(simulate(WORLD, asked(600, arrivals))) <= limit["tpot_p95"]) is passes


def replayed(rate: float, *broken: str) -> OpenLoop:
    return OpenLoop(rate, broken, trial=0)


def test_the_bracket_is_the_slowest_failure_and_the_fastest_pass_below_it() -> None:
    passing, failing = bracket(
        [replayed(1.0), replayed(4.0), replayed(3.0, "e2e_p95"), replayed(2.0), replayed(5.0, "e2e_p95")]
    )
    assert (passing, failing) == (replayed(2.0), replayed(3.0, "e2e_p95"))
    assert bracket([replayed(1.0)]) == (replayed(1.0), None)
    assert bracket([]) == (None, None)


def test_the_prediction_is_tried_first_then_steps_towards_what_is_missing_then_the_middle() -> None:
    assert next_rate([], 2.0) == 2.0
    assert next_rate([replayed(0.3)], 2.0) == 2.0  # the trace's own load passed: the prediction is still ahead
    assert next_rate([replayed(2.0)], 2.0) == 3.0
    assert next_rate([replayed(2.0, "e2e_p95")], 2.0) == pytest.approx(2.0 / 1.5)
    assert next_rate([replayed(2.0), replayed(2.88, "e2e_p95")], 2.0) == pytest.approx(2.4)
    assert next_rate([replayed(0.1), replayed(2.0, "e2e_p95")], 2.0) == pytest.approx(2.0 / 1.5)  # not 0.45
    assert next_rate([replayed(2.0), replayed(2.2, "e2e_p95")], 2.0) is None


@given(st.floats(0.01, 100), st.floats(-0.6, 0.6), st.floats(0.05, 0.9))
def test_four_replays_bracket_a_ceiling_that_lies_within_a_factor_of_2_of_the_prediction(
    truth: float, error: float, own_load: float
) -> None:
    replays = [replayed(truth * own_load)]
    predicted = truth * math.exp(error)
    for _ in range(REPLAYS):
        rate = next_rate(replays, predicted)
        if rate is None:
            break
        replays.append(replayed(rate, *(["tpot_p95"] if rate > truth else [])))
    passing, failing = bracket(replays)
    assert passing is not None
    assert failing is not None
    assert passing.requests_per_s <= truth < failing.requests_per_s
    assert failing.requests_per_s <= passing.requests_per_s * STEP**2
    assert len({r.requests_per_s for r in replays}) == len(replays)  # no rate is sent twice


def test_a_request_that_was_not_answered_breaks_every_limit() -> None:
    summary = {"p50": 0.01, "p95": 0.02}
    counts = {"sent": 40, "completed": 39}
    trial = Trial(
        *(3, "COMPLETE", "confirm", ServingConfig("reference", "m"), Load("trace", "t.jsonl", None, 0.5), "key"),
        *(CAPACITY_STAGE, (0, 1, 2)),
        metrics={"requests": counts, "tpot_s": summary},
    )
    trace = SimpleNamespace(name="t.jsonl", arrivals_s=np.array([0.0, 1.0, 4.0]))
    findings = SimpleNamespace(
        settings=SimpleNamespace(slo={"tpot_p95": 0.04}), trials=[trial], space=SimpleNamespace(batch_sizes=())
    )
    assert open_loops(findings, trace, trial.config) == [OpenLoop(1.0, ("requests not answered",), 3)]  # type: ignore[arg-type]
    findings.trials = [replace(trial, metrics={"requests": {"sent": 40, "completed": 40}, "tpot_s": summary})]
    assert open_loops(findings, trace, trial.config) == [OpenLoop(1.0, (), 3)]  # type: ignore[arg-type]
