"""Times in every spelling that traces have."""

from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.times import Clock, guess_unit, iso_ns, iso_text, number_in

NOON = 1_700_000_000 * 10**9  # 2023-11-14 22:13:20 UTC


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("2023-11-14 22:13:20", 0),
        ("2023-11-14T22:13:20Z", 0),
        ("2023-11-14 22:13:20.1234567", 123_456_700),
        ("2023-11-14T22:13:20.123456789Z", 123_456_789),
        ("2023-11-14T22:13:20.1234567891", 123_456_789),  # more digits than a nanosecond: cut
        ("2023-11-14 22:13:20,5", 500_000_000),
        ("2023-11-14T23:13:20+01:00", 0),
        ("2023-11-14T16:43:20-0530", 0),
        ("2023-11-15T00:13:20+02", 0),
    ],
)
def test_iso_times_are_exact(text: str, ns: int) -> None:
    assert iso_ns(text) == NOON + ns


@pytest.mark.parametrize(
    "text", ["2023-02-30 00:00:00", "2023-11-14", "22:13:20", "2023-11-14 22:13", "", "9999-01-01 00:00:00"]
)
def test_what_is_no_time_is_none(text: str) -> None:
    assert iso_ns(text) is None


@given(st.integers(0, 2**62))
def test_iso_text_is_the_inverse(ns: int) -> None:
    assert iso_ns(iso_text(ns)) == ns


@pytest.mark.parametrize(
    ("text", "value"), [("5", 5), (" 5.5 ", 5.5), ("1e3", 1000.0), ("-2", -2), ("0x5", None), ("nan", None)]
)
def test_numbers_as_text(text: str, value: float | None) -> None:
    assert number_in(text) == value


@pytest.mark.parametrize(
    ("numbers", "usual", "unit"),
    [
        ([1_700_000_000, 1_700_000_060], None, "s"),
        ([1_700_000_000_000, 1_700_000_060_000], "s", "ms"),
        ([1_700_000_000_000_000, 1_700_000_000_000_001], None, "us"),
        ([1_700_000_000_000_000_000], "ms", "ns"),
        ([0.0, 0.2, 0.4], "ms", "s"),  # fractions
        ([0, 3000, 3000, 6001], "ms", "ms"),  # Mooncake's own
        ([0, 1, 1, 2, 3], "ms", "s"),  # over 500 requests a second otherwise
        ([5, 45, 90], None, "s"),  # BurstGPT's
        ([0, 60_000, 120_000], None, "ms"),  # one request in a minute or slower otherwise
        ([0], "ms", "ms"),
    ],
)
def test_the_unit_is_guessed_and_said(numbers: list[float], usual: str | None, unit: str) -> None:
    found, note = guess_unit(np.array(numbers), usual)
    assert found == unit
    assert ("taken as" in note) != ("Unix times" in note)


def test_one_column_may_mix_spellings() -> None:
    clock = Clock()
    moment = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    raw = [
        "2023-11-14 22:13:20",
        "1700000000.5",
        1_700_000_001,
        moment.astimezone(timezone(timedelta(hours=5))),
        "never",
        None,
        True,
    ]
    ns, valid = clock.to_ns(raw)
    assert valid.tolist() == [True, True, True, True, False, False, False]
    assert (ns[valid] - NOON).tolist() == [0, 500_000_000, 1_000_000_000, 0]


def test_beside_dates_a_small_number_has_no_place() -> None:
    _, valid = Clock().to_ns(["2023-11-14 22:13:20", 5])
    assert valid.tolist() == [True, False]


def test_the_unit_given_is_used_and_not_guessed() -> None:
    clock = Clock("us")
    ns, _ = clock.to_ns([0, 3000])
    assert (ns.tolist(), clock.notes) == ([0, 3_000_000], [])


def test_numbers_that_no_clock_shows_are_refused() -> None:
    _, valid = Clock("s").to_ns(pa.array([1.0, float("nan"), float("inf"), 1e12]))
    assert valid.tolist() == [True, False, False, False]


def test_whole_columns_of_iso_text_equal_those_read_one_by_one() -> None:
    texts = [f"2024-05-10 00:00:{i:02}.{i:06}" for i in range(20)]
    whole, _ = Clock().to_ns(pa.array(texts))
    assert whole.tolist() == [iso_ns(text) for text in texts]
    mixed = [*texts, "2024-05-10 00:00:05+00:00"]
    slow, valid = Clock().to_ns(pa.array(mixed))
    assert valid.all()
    assert slow.tolist() == [iso_ns(text) for text in mixed]
