"""Parts of a trace: what they keep of its shape, and that they are the same at every run."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workloads.traces import trace_of
from workloads.select import PREFIX_CHARS, distance, hold_out, jitter, representative, shares_prefix, thin
from workloads.types import Trace, WorkloadError


def long_trace(rows: int = 2000) -> Trace:
    rng = np.random.default_rng(0)
    return trace_of(
        arrival_s=np.sort(rng.uniform(0, 1000, rows)).tolist(),
        input_tokens=rng.lognormal(6, 1, rows).astype(int).tolist(),
        output_tokens=rng.lognormal(4, 1, rows).astype(int).tolist(),
        category=rng.choice(["chat", "code", "math"], rows, p=[0.7, 0.2, 0.1]).tolist(),
        session_id=[None if i % 4 else f"s{i // 20}" for i in range(rows)],
        prefix_blocks=[[int(i % 300)] if i % 2 else [10_000 + i] for i in range(rows)],
    )


def test_thinning_keeps_the_rate_s_shape_and_whole_sessions() -> None:
    whole = long_trace()
    part = thin(whole, 0.25, seed=3)
    assert len(part) == pytest.approx(500, abs=60)
    halves = [np.mean(t.arrivals_s < 500) for t in (whole, part)]
    assert halves[0] == pytest.approx(halves[1], abs=0.05)
    kept = set(part.values("session_id")) - {None}
    members = [s in kept for s in whole.values("session_id") if s is not None]
    assert sum(members) == sum(s is not None for s in part.values("session_id"))
    assert part.read == part.kept + sum(part.dropped.values())
    assert (part.dropped, part.notes) == ({"thinned": 2000 - len(part)}, ("thinned to 0.25 of the sessions (seed 3)",))
    assert thin(whole, 0.25, seed=3).table == part.table != thin(whole, 0.25, seed=4).table


@pytest.mark.parametrize("share", [0, -1, 1.5, float("nan"), 1e-9])
def test_a_share_that_leaves_nothing_is_refused(share: float) -> None:
    with pytest.raises(WorkloadError, match="--thin"):
        thin(trace_of(input_tokens=[1, 2]), share, seed=0)


def test_jitter_spreads_a_grid_and_stays_within_its_quantum() -> None:
    grid = trace_of(arrival_s=[3.0 * (i // 10) for i in range(500)], input_tokens=list(range(500)))
    spread = jitter(grid, 3.0, seed=1)
    moved = dict(zip(spread.values("input_tokens"), spread.arrivals_s, strict=True))
    first = min(moved[i] for i in range(10))
    assert first == 0.0
    shifts = np.array([moved[i] - 3.0 * (i // 10) for i in range(500)])
    assert shifts.max() - shifts.min() < 3.0
    assert np.histogram(shifts, 3)[0].min() > 120  # uniform: 167 in each third
    assert (np.diff(spread.arrivals_s) >= 0).all()
    with pytest.raises(WorkloadError, match="--jitter"):
        jitter(grid, 0.0, seed=1)


def test_a_representative_part_has_the_whole_s_shares_to_within_one_request() -> None:
    whole = long_trace()
    chosen = representative(whole, 100, seed=0)
    assert chosen == sorted(set(chosen)) == representative(whole, 100, seed=0)
    categories = whole.values("category")
    for name in ("chat", "code", "math"):
        assert abs(sum(categories[i] == name for i in chosen) - 100 * categories.count(name) / 2000) <= 1
    found = distance(whole, chosen)
    random = np.mean([distance(whole, np.random.default_rng(s).choice(2000, 100, False))["input"] for s in range(20)])
    assert found["input"] < random
    assert all(value is not None and value < 0.1 for value in found.values())


def test_the_whole_has_no_distance_from_itself_and_a_corner_a_large_one() -> None:
    whole = long_trace()
    assert set(distance(whole, range(2000)).values()) == {0.0}
    longest = np.argsort(whole.numbers("input_tokens"))[-100:]
    assert distance(whole, longest)["input"] == pytest.approx(0.95, abs=0.01)
    assert distance(trace_of(prompt=["a", "b"]), [0])["category"] is None


@given(rows=st.integers(1, 60), n=st.integers(1, 30), held=st.integers(1, 60), seed=st.integers(0, 5))
@settings(deadline=None)
def test_the_held_out_part_is_disjoint_while_there_are_enough_rows(rows: int, n: int, held: int, seed: int) -> None:
    trace = trace_of(input_tokens=[1 + i * 7 % 13 for i in range(rows)])
    taken = representative(trace, n, seed=seed)
    rest = hold_out(trace, taken, held, seed=seed)
    assert len(taken) == min(n, rows)
    assert len(rest) == min(held, rows)
    assert len(set(rest)) == len(rest)
    if rows >= n + held:
        assert not set(rest) & set(taken)
    else:
        assert set(range(rows)) - set(taken) <= set(rest)  # all that is left is used before anything is used again


def test_prefixes_are_shared_by_blocks_or_by_long_beginnings() -> None:
    blocks = trace_of(prefix_blocks=[[1, 2], [1, 3], [2, 1], []])
    assert shares_prefix(blocks).tolist() == [True, True, False, False]
    same = "x" * PREFIX_CHARS
    assert shares_prefix(trace_of(prompt=[same + "a", same + "b", "x", "x"])).tolist() == [True, True, False, False]
