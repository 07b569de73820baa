"""Acceptance by group, from chunks whose sizes each test writes down."""

from typing import Any

import pyarrow as pa
import pytest

from harness.breakdown import breakdown
from harness.measure import SCHEMA


def records(*rows: dict[str, Any]) -> pa.Table:
    blank = dict.fromkeys(SCHEMA.names)
    filled = [{**blank, "index": i, "status": "completed", "input_tokens": 10, **row} for i, row in enumerate(rows)]
    for row in filled:
        sizes = row["chunk_tokens"]
        if row["chunk_s"] is None:
            row["chunk_s"] = [float(t) for t in range(len(sizes or []))]
    return pa.Table.from_pylist(filled, schema=SCHEMA)


def test_acceptance_is_pooled_over_the_steps_of_each_category() -> None:
    # code: steps of 3, 3 and 1 tokens; chat: 1, 1, 1, 2. The first chunk is the prompt's own token and no step.
    table = records({"category": "code", "chunk_tokens": [1, 3, 3, 1]}, {"category": "chat", "chunk_tokens": [1, 1, 1, 1, 2]})
    found = breakdown(table, tau=12 / 7, k=4)
    chat, code = found.by_category
    assert (code.group, code.requests, code.steps, code.tokens, code.first_accepted) == ("code", 1, 3, 7, 2)
    assert (chat.tau, chat.first_position_rate) == (1.25, 0.25)
    assert code.tau_ci95 is None  # one request carries no interval
    assert found.missing is None


def test_a_step_counts_in_the_bucket_its_context_has_then() -> None:
    # 510 prompt tokens and the first token: the first step begins at 511, the second at 514, beyond 512.
    found = breakdown(records({"input_tokens": 510, "chunk_tokens": [1, 3, 2]}), tau=2.5, k=4)
    assert [(g.group, g.steps, g.tokens) for g in found.by_context] == [
        ("0 to 511 tokens", 1, 3),
        ("512 to 2,047 tokens", 1, 2),
    ]


def test_time_is_cut_into_quarters_of_the_load() -> None:
    row = {"chunk_tokens": [1, 2, 2, 1, 1], "chunk_s": [0.0, 1.0, 2.0, 4.0, 5.0]}
    found = breakdown(records(row), tau=1.5, k=4)
    # steps end at 1, 2, 4, 5 s: shares 0, 0.25, 0.75, 1
    assert [(g.group, g.tau) for g in found.by_time] == [("1 of 4", 2.0), ("2 of 4", 2.0), ("4 of 4", 1.0)]


def test_groups_add_up_to_the_whole_and_failures_count_nowhere() -> None:
    table = records(
        {"category": "a", "chunk_tokens": [1, 2, 1]},
        {"category": None, "chunk_tokens": [1, 3]},
        {"category": "a", "status": "failed", "chunk_tokens": [1, 1, 1, 1]},
    )
    found = breakdown(table, tau=2.0, k=4)
    assert [g.group for g in found.by_category] == ["a", "none"]
    for groups in (found.by_category, found.by_context, found.by_time):
        assert (sum(g.steps for g in groups), sum(g.tokens for g in groups)) == (3, 6)


@pytest.mark.parametrize(
    ("sizes", "tau", "said"),
    [
        (None, 1.5, "does not say how many tokens"),
        ([1, 4, 4], 2.0, "merges steps into chunks"),
        ([1, 6, 1, 1, 1], 2.25, "more than K + 1 = 5 tokens"),
        ([1, 2, 2], None, "a step not known"),
        ([1], 1.0, "no request decoded more than one token"),
    ],
)
def test_where_chunks_are_no_steps_nothing_is_guessed(sizes: list[int] | None, tau: float | None, said: str) -> None:
    found = breakdown(records({"chunk_tokens": sizes, "chunk_s": [0.0, 1.0]}), tau=tau, k=4)
    assert said in (found.missing or "")
    assert found.by_category == found.by_context == found.by_time == ()


def test_enough_requests_give_an_interval() -> None:
    table = records(*({"category": "a", "chunk_tokens": [1, 2, 1 + i % 2]} for i in range(60)))
    (group,) = breakdown(table, tau=1.75, k=4).by_category
    assert group.tau_ci95 is not None
    assert group.tau_ci95[0] < 1.75 < group.tau_ci95[1]
