"""Acceptance of a load: which tokens and which steps count, and when the counts are not believed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends.types import SpecCounters
from harness.replay import Replay
from harness.speculation import speculation
from harness.types import Load, RequestRecord

COUNTERS = SpecCounters(
    generated_tokens=32,
    first_tokens=2,
    decode_steps=12,
    drafted_steps=12,
    draft_tokens=36,
    accepted_tokens=18,
    accepted_per_position=(9, 6, 3),
)


def record(index: int, tokens: int | None = 16, status: Any = "completed", **fields: Any) -> RequestRecord:
    return RequestRecord(index, status, output_tokens=tokens, **fields)


def replay(records: list[RequestRecord], counters: SpecCounters | None, lead: list[RequestRecord] | None = None) -> Replay:
    return Replay(Load("closed", "t", 1), records, lead or [], (0.0, 1.0), 1.0, counters)


def test_tau_is_tokens_after_each_first_over_all_decode_steps() -> None:
    spec, warnings, invalid = speculation(replay([record(0), record(1)], COUNTERS), closed=True)
    assert (spec.tau, spec.tau_counter, spec.tau_drafted) == (30 / 12, 30 / 12, 1 + 18 / 12)
    assert (spec.acceptance_rate, spec.position_rates) == (0.5, (0.75, 0.5, 0.25))
    assert spec.tau == 1 + sum(spec.position_rates)
    assert (spec.verify_steps, spec.drafted_steps, spec.draft_tokens, spec.accepted_tokens) == (12, 12, 36, 18)
    assert (warnings, invalid) == ([], None)


def test_tokens_of_the_lead_count_too_since_the_counters_hold_its_steps() -> None:
    spec, _, _ = speculation(replay([record(0)], COUNTERS, lead=[record(1)]), closed=True)
    assert spec.tau == 30 / 12


def test_tokens_beyond_the_end_count_for_the_server_and_not_for_the_user() -> None:
    spec, warnings, _ = speculation(replay([record(0), record(1, 13)], COUNTERS), closed=False)
    assert (spec.tau, spec.tau_counter) == (27 / 12, 30 / 12)
    assert any("tau from the streams is 2.250, from the server's counters 2.500" in w for w in warnings)


def test_within_one_percent_nothing_is_said() -> None:
    counters = replace(COUNTERS, generated_tokens=1000, first_tokens=1, decode_steps=500, accepted_per_position=(9, 6, 3))
    _, warnings, _ = speculation(replay([record(0, 996)], counters), closed=False)
    assert not any("apart" in w for w in warnings)


def test_steps_without_a_draft_make_two_taus_and_both_are_given() -> None:
    counters = replace(COUNTERS, drafted_steps=6, accepted_per_position=(6, 6, 6))
    spec, _, _ = speculation(replay([record(0), record(1)], counters), closed=False)
    assert (spec.tau, spec.tau_drafted) == (2.5, 4.0)


@pytest.mark.parametrize(
    "broken", [record(1, None), record(1, None, "failed", failure="truncated"), record(1, None, "cancelled")]
)
def test_a_request_whose_tokens_nobody_counted_leaves_the_server_s_own_tau(broken: RequestRecord) -> None:
    spec, warnings, _ = speculation(replay([record(0), broken], COUNTERS), closed=False)
    assert spec.tau == COUNTERS.tau
    assert any("from the server's counters alone" in w for w in warnings)


@pytest.mark.parametrize("harmless", [record(1, None, "refused"), record(1, None, "failed", failure="connect")])
def test_a_request_that_made_no_token_changes_nothing(harmless: RequestRecord) -> None:
    counters = replace(COUNTERS, generated_tokens=16, first_tokens=1, decode_steps=6, accepted_per_position=(5, 3, 1))
    spec, _, _ = speculation(replay([record(0), harmless], counters), closed=False)
    assert spec.tau == 15 / 6


def test_a_dead_draft_is_named() -> None:
    counters = replace(COUNTERS, accepted_tokens=0, accepted_per_position=(0, 0, 0), generated_tokens=14)
    spec, warnings, _ = speculation(replay([record(0, 7), record(1, 7)], counters), closed=False)
    assert (spec.tau, spec.acceptance_rate) == (1.0, 0.0)
    assert "none of 36 draft tokens was accepted: the draft is dead" in warnings


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"accepted_tokens": 37}, "counts 37 accepted of 36 draft tokens"),
        ({"accepted_per_position": (13, 6, 3)}, "more accepted drafts at a position than steps with a draft"),
    ],
)
def test_impossible_counts_are_not_used(change: dict[str, Any], reason: str) -> None:
    spec, _, invalid = speculation(replay([record(0), record(1)], replace(COUNTERS, **change)), closed=False)
    assert spec.tau is None
    assert reason in (invalid or "")


def test_what_the_server_does_not_publish_stays_unknown() -> None:
    assert speculation(replay([record(0)], None), closed=False) == (speculation(replay([record(0)], None), closed=True))
    spec, warnings, invalid = speculation(replay([record(0)], SpecCounters(generated_tokens=16, first_tokens=1)), closed=False)
    assert (spec.tau, spec.tau_drafted, spec.acceptance_rate, spec.position_rates) == (None, None, None, ())
    assert (warnings, invalid) == ([], None)


def test_the_interval_comes_from_requests_in_closed_loop_only() -> None:
    """60 requests of 20 decode steps each; every step emits 2.5 tokens on average."""
    rng = np.random.default_rng(0)
    records = [record(i, 1 + int(rng.integers(1, 5, 20).sum()), chunk_s=tuple(float(t) for t in range(21))) for i in range(60)]
    emitted = sum((r.output_tokens or 0) - 1 for r in records)
    counters = SpecCounters(generated_tokens=emitted + 60, first_tokens=60, decode_steps=1200)
    spec, _, _ = speculation(replay(records, counters), closed=True)
    assert spec.tau_ci95 is not None
    low, high = spec.tau_ci95
    assert low < emitted / 1200 < high
    assert high - low == pytest.approx(2 * 1.96 * 1.118 / 1200**0.5, rel=0.3)  # sd of uniform 1..4 is 1.118
    assert speculation(replay(records, counters), closed=False)[0].tau_ci95 is None
    assert speculation(replay(records[:59], counters), closed=True)[0].tau_ci95 is None
