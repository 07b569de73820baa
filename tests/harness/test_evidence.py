import math

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.types import ServingConfig
from harness.decide import BatchEvidence, Ratio
from harness.evidence import batch_shares, best_k, log_ratio, score, weights_of
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
    evidence = {config(2): rows(b1=1.2, b8=1.1), config(4): rows(b1=1.5, b8=0.9), config(6): rows(b1=1.505, b8=0.5)}
    assert best_k(evidence, config(4)) == ((1, 4), (8, 2))  # K 6 is within 1 % of K 4: the smaller wins
    assert best_k({config(2): rows(b1=0.9)}, config(2)) == ((1, 0),)


def test_the_schedule_holds_one_variant_only() -> None:
    evidence = {config(2): rows(b1=1.2), config(4, "suffix"): rows(b1=2.0)}
    assert best_k(evidence, config(2)) == ((1, 2),)


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
