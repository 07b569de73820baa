"""Reports of real runs of the reference engine on the bundled trace. Minutes long, and true on a machine that does nothing else."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.real_runs import SAMPLE, confirmed_speedups, tune

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(3600)]  # not in CI: its machine does other things


def test_the_break_even_batch_size_lies_between_measured_neighbours_and_off_is_better_above_it() -> None:
    result = tune(
        "reference-break-even",
        SAMPLE,
        *("--variants", "off,eagle3", "--k", "4", "--batch-sizes", "1,4,16,32", "--strategy", "grid"),
        *("--max-output-tokens", "40", "--time-scale", "0.25", "--search-requests", "16", "--confirm-requests", "64"),
    )
    measured = confirmed_speedups(result)
    assert sorted(measured) == [1, 4, 16, 32]
    (decision,) = result["decisions"]
    break_even = decision["by_engine"][0]["break_even_batch"]["value"]
    values = {batch: speedup["value"] for batch, speedup in measured.items()}
    assert break_even is not None, values
    below, above = next((a, b) for a, b in pairwise(sorted(values)) if a <= break_even <= b)
    assert values[below] > 1 > values[above], values
    assert measured[1]["ci95"][0] > 1  # on is better beyond doubt at the smallest batch size
    assert measured[above]["ci95"][1] < 1  # and off at the one above the break-even, and better from there on
    assert all(value < 1 for batch, value in values.items() if batch >= above), values


def test_one_real_replay_within_the_limit_and_one_beyond_it_bracket_the_capacity() -> None:
    result = tune(
        "reference-capacity",
        SAMPLE,
        *("--variants", "off,ngram", "--k", "6", "--batch-sizes", "1,4,16", "--strategy", "grid", "--slo", "e2e_p95=8s"),
        *("--max-output-tokens", "40", "--time-scale", "0.5", "--search-requests", "16", "--confirm-requests", "40"),
    )
    trials = {trial["number"]: trial for trial in result["trials"]}
    (entry,) = result["capacity"]
    for side in entry["sides"]:
        passing, failing = side["open_loop"]["passing"], side["open_loop"]["failing"]
        assert passing["requests_per_s"] < failing["requests_per_s"]
        assert trials[passing["trial"]]["metrics"]["e2e_s"]["p95"] <= 8.0 < trials[failing["trial"]]["metrics"]["e2e_s"]["p95"]
        assert {trials[r["trial"]]["config"]["variant"] for r in (passing, failing)} == {side["config"]["variant"]}
