import math
from typing import Literal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.types import ServingConfig
from harness.decide import BatchEvidence, Evidence, Ratio
from harness.evidence import batch_shares, best_k, evidence_of, log_ratio, score, weights_of
from harness.store import Trial
from harness.types import Load


def records(*spans: tuple[float | None, float | None]) -> pa.Table:
    return pa.table({"sent_s": [a for a, _ in spans], "last_token_s": [b for _, b in spans]}, schema=SPANS)


SPANS = pa.schema([("sent_s", pa.float64()), ("last_token_s", pa.float64())])


def test_shares_are_of_busy_time_only() -> None:
    # 0-2 one request, 2-3 two, 3-4 one, then idle until 10, 10-11 one: 4 s at one, 1 s at two.
    assert batch_shares(records((0, 3), (2, 4), (10, 11))) == pytest.approx({1: 0.8, 2: 0.2})


def test_a_failed_request_holds_no_place() -> None:
    assert batch_shares(records((0, 1), (0, None), (None, None))) == {1: 1.0}
    assert batch_shares(records()) == {}


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 50)), min_size=1, max_size=30))
def test_shares_sum_to_one_and_never_pass_the_number_of_requests(spans: list[tuple[float, float]]) -> None:
    shares = batch_shares(records(*[(a, a + d) for a, d in spans]))
    assert sum(shares.values()) == pytest.approx(1.0)
    assert all(1 <= batch <= len(spans) for batch in shares)


def test_each_share_goes_to_the_nearest_batch_size_on_a_log_scale() -> None:
    # 3 lies nearer to 4 than to 1 (log 4/3 < log 3); 8 is as near to 4 as to 16 and goes down.
    assert weights_of({1: 0.5, 3: 0.2, 8: 0.3}, (1, 4, 16)) == pytest.approx({1: 0.5, 4: 0.5, 16: 0.0})
    assert weights_of({}, (1, 4)) == {1: 0.5, 4: 0.5}


def config(k: int, variant: str = "ngram") -> ServingConfig:
    return ServingConfig(backend="reference", model="m", variant=variant, k=k)


def rows(**speedups: float) -> tuple[BatchEvidence, ...]:
    return tuple(
        BatchEvidence(int(name[1:]), Ratio(value, None), None, Ratio(value, None), None) for name, value in speedups.items()
    )


def test_the_schedule_takes_the_fastest_k_at_each_batch_size_and_none_where_off_is_faster() -> None:
    by_k = {2: {1: 1.2, 8: 1.1}, 4: {1: 1.5, 8: 0.9}, 6: {1: 1.505, 8: 0.5}}
    speedups = {(config(k), batch): value for k, values in by_k.items() for batch, value in values.items()}
    assert best_k(speedups, config(4)) == ((1, 4), (8, 2))  # K 6 is within 1 % of K 4: the smaller wins
    assert best_k({(config(2), 1): 0.9}, config(2)) == ((1, 0),)


def test_the_schedule_holds_one_variant_only() -> None:
    assert best_k({(config(2), 1): 1.2, (config(4, "suffix"), 1): 2.0}, config(2)) == ((1, 2),)


def test_the_score_weighs_by_the_traces_batch_sizes() -> None:
    assert score(rows(b1=2.0, b8=0.5), {1: 0.75, 8: 0.25}) == pytest.approx(0.5 * math.log(2))
    assert score((), {1: 1.0}) == float("-inf")


def trial(p50: float, rate: float) -> Trial:
    metrics = {"e2e_s": {"p50": p50, "p95": 2 * p50}, "tpot_s": None, "output_tokens_per_s": rate, "goodput_rps": None}
    load = Load(mode="closed", trace="t", concurrency=1)
    return Trial(0, "COMPLETE", "search", config(2), load, "k", "search", (), metrics=metrics)


def test_log_ratios_are_smaller_where_the_trial_is_better() -> None:
    fast, slow = trial(1.0, 20.0), trial(2.0, 10.0)
    assert log_ratio(fast, slow, "e2e_p50") == pytest.approx(-math.log(2))
    assert log_ratio(fast, slow, "throughput") == pytest.approx(-math.log(2))
    assert log_ratio(fast, slow, "cost") == pytest.approx(-math.log(2))
    assert log_ratio(fast, slow, "tpot_p50") is None
    assert log_ratio(fast, slow, "goodput") is None


OFF, ON = config(2).off(), config(2)


def run(number: int, server: ServingConfig, stage: str, mode: Literal["closed", "trace"] = "closed") -> Trial:
    metrics = {"tpot_s": {"p50": 0.1 if server.k else 0.2}}
    load = Load(mode=mode, trace="t", concurrency=4 if mode == "closed" else None)
    speculation = {"tau": 2.0, "tau_drafted": 2.0, "drafted_steps": 1, "verify_steps": 1}
    return Trial(number, "COMPLETE", "confirm", server, load, str(number), stage, (), metrics=metrics, speculation=speculation)


def evidence(
    trials: list[Trial],
    slow: dict[int, float],
    searched: dict[ServingConfig, tuple[BatchEvidence, ...]] | None = None,
    estimates: dict[tuple[ServingConfig, int], float] | None = None,
) -> Evidence:
    """`slow`: trial number -> factor on all its times; with ON they are half of OFF's."""

    def records_of(trial: Trial) -> pa.Table:
        times = [slow[trial.number] * (1 + i / 100) * (1 if trial.config.k else 2) for i in range(100)]
        return pa.table(
            {"index": range(100), "status": ["completed"] * 100, "e2e_s": times, "output_tokens": [10] * 100,
             "session": pa.array([None] * 100, pa.string())}
        )  # fmt: skip

    return evidence_of(
        ON, trials, "t", objective="e2e_p50", search_evidence=searched or {}, estimates=estimates or {}, shares={}, drift=1.2,
        records_of=records_of,
    )  # fmt: skip


def test_the_schedule_takes_a_measured_k_at_batch_sizes_where_only_its_estimate_is_known() -> None:
    searched = {config(2): rows(b4=1.3), config(4): rows(b1=1.5, b4=1.2)}
    estimates = {(config(2), 1): 1.6, (config(2), 4): 1.3, (config(4), 1): 1.5, (config(4), 4): 1.2, (config(6), 1): 3.0}
    found = evidence([run(0, OFF, "confirm1"), run(1, ON, "confirm1")], {0: 1.0, 1: 1.0}, searched, estimates)
    assert found.schedule == ((1, 2), (4, 2))  # K = 6 never ran


def test_interleaved_confirmations_are_compared_run_by_run() -> None:
    order = [(OFF, "confirm1"), (ON, "confirm1"), (ON, "confirm2"), (OFF, "confirm2")]
    trials = [run(i, server, stage) for i, (server, stage) in enumerate(order)]
    found = evidence(trials, {0: 1.0, 1: 1.0, 2: 1.1, 3: 1.1})  # the machine slowed down for a whole round
    assert found.by_batch[0].speedup.value == pytest.approx(2.0)
    assert found.by_batch[0].speedup.better
    assert found.by_batch[0].throughput.value == pytest.approx(2.0)
    assert found.drift == 1.0
    noisy = evidence(trials, {0: 1.0, 1: 1.0, 2: 1.6, 3: 1.0})
    assert noisy.by_batch[0].speedup.ci95 is not None
    assert noisy.by_batch[0].speedup.ci95[0] < 1 < noisy.by_batch[0].speedup.value  # two pairs that disagree decide nothing


def test_one_confirmation_keeps_the_drift_beside_it() -> None:
    found = evidence([run(0, OFF, "confirm"), run(1, ON, "confirm")], {0: 1.0, 1: 1.0})
    assert (found.drift, found.by_batch[0].speedup.value) == (1.2, pytest.approx(2.0))


def test_five_replays_of_each_side_give_an_interval_at_the_trace_s_own_load() -> None:
    trials = [run(i, OFF if i % 2 else ON, "confirm", "trace") for i in range(10)]
    slow = {i: 1 + i / 100 for i in range(10)}
    few = evidence(trials[:8], slow).open_e2e_p50
    assert few is not None
    assert few.ci95 is None
    enough = evidence(trials, slow).open_e2e_p50
    assert enough is not None
    assert enough.value == pytest.approx(2.02, abs=0.01)
    assert enough.better
