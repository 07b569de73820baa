from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from harness.sse import EventParser

STREAM = 'event: error\ndata: {"a": "é\u2028日本"}\n\n: comment\r\n\r\ndata: one\r\ndata: two\r\n\r\ndata:[DONE]\n\n'.encode()
EVENTS = [(b"error", '{"a": "é\u2028日本"}'.encode()), (b"", b"one\ntwo"), (b"", b"[DONE]")]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_where_reads_cut_the_stream(cuts: list[int]) -> None:
    parser = EventParser()
    places = [0, *sorted(cuts), len(STREAM)]
    found = [event for a, b in pairwise(places) for event in parser.feed(STREAM[a:b])]
    assert found + parser.close() == EVENTS


def test_an_event_without_its_blank_line_counts_at_the_end() -> None:
    parser = EventParser()
    assert parser.feed(b"data: [DONE]") == []
    assert parser.close() == [(b"", b"[DONE]")]


def test_whole_events_are_read_alike_on_the_quick_path() -> None:
    assert EventParser().feed(b"data: x\n\n") == [(b"", b"x")]
    assert EventParser().feed(b"data: x\n\ndata: y\n\n") == [(b"", b"x"), (b"", b"y")]
