from __future__ import annotations

import pytest

from reports.text import clean, factor, ms, number, seconds, value_text, words


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (ms(None), "–"),
        (ms(0.0786), "78.6"),
        (ms(1.8434), "1,843"),
        (ms(0.00042), "0.420"),
        (number(None), "–"),
        (number(0.0), "0"),
        (number(1234567), "1,234,567"),
        (number(99.94), "99.9"),
        (factor(None), "–"),
        (factor(1.416), "1.42×"),
        (seconds(42.0), "42 s"),
        (seconds(450.0), "7.5 min"),
        (seconds(None), "–"),
        (value_text("exact_match_share", 0.95), "95.0 %"),
        (value_text("ttft_p95_s", 0.25), "250 ms"),
        (value_text("rate_per_s", 1.95), "1.95"),
        (value_text("ok", True), "yes"),
        (words("ttft_p95_s"), "TTFT p95"),
        (words("rate_per_s"), "Rate per s"),
    ],
)
def test_values_for_people(shown: str, expected: str) -> None:
    assert shown == expected


def test_control_characters_and_direction_overrides_become_visible() -> None:
    assert clean("a\x00b\x1b[1m\u202ec\td\n שלום", show_text=True) == "a\\x00b\\x1b[1m\\u202ec\td\n שלום"


def test_credentials_in_urls_are_dropped() -> None:
    assert clean({"storage": "postgresql://u:p@db/x"}, show_text=True) == {"storage": "postgresql://db/x"}


def test_keys_that_hold_workload_text_are_dropped_at_any_depth() -> None:
    value = {"a": [{"prompt": "hi", "n": 1}], "output_text": "x"}
    assert clean(value, show_text=False) == {"a": [{"n": 1}]}
    assert clean(value, show_text=True) == value
