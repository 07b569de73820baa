"""Prompt lookup and suffix decoding propose what their definitions say."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.matchers import NgramIndex, SuffixIndex, propose_ngram

HISTORIES = st.lists(st.integers(0, 3), max_size=40)


def by_definition(tokens: Sequence[int], k: int, min_n: int, max_n: int, match: str) -> list[int]:
    """Scan for the longest n whose last n tokens occurred before."""
    for n in range(max_n, min_n - 1, -1):
        starts = [i for i in range(len(tokens) - n) if list(tokens[i : i + n]) == list(tokens[-n:])]
        if starts:
            at = (starts[0] if match == "earliest" else starts[-1]) + n
            return list(tokens[at : at + k])
    return []


def test_known_answers() -> None:
    history = [1, 2, 3, 9, 1, 2, 4, 8, 1, 2]
    assert propose_ngram(history, k=3, min_n=2, max_n=4) == [3, 9, 1]  # the earliest 1 2
    assert propose_ngram(history, k=3, min_n=2, max_n=4, match="latest") == [4, 8, 1]
    assert propose_ngram([*history, 4], k=9, min_n=2, max_n=4) == [8, 1, 2, 4]  # 1 2 4 beats 2 4; no more than there is
    assert propose_ngram([1, 2, 3], k=3) == []
    assert propose_ngram([5, 5, 5], k=3, min_n=1, max_n=2) == [5]  # a match may overlap the end


@given(HISTORIES, st.integers(1, 6), st.integers(1, 3), st.integers(0, 3), st.sampled_from(["earliest", "latest"]))
def test_the_index_equals_the_scan(tokens: list[int], k: int, min_n: int, more: int, match: str) -> None:
    assert propose_ngram(tokens, k, min_n, min_n + more, match) == by_definition(tokens, k, min_n, min_n + more, match)


@given(HISTORIES, st.lists(st.integers(1, 5), max_size=40))
def test_growing_in_parts_equals_growing_at_once(tokens: list[int], sizes: list[int]) -> None:
    index = NgramIndex()
    for size in [*sizes, len(tokens)]:
        at = len(index)
        index.extend(tokens[at : at + size])
        assert index.propose(4) == propose_ngram(tokens[: len(index)], 4)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="1 <= min_n <= max_n"):
        NgramIndex(3, 2)


def suffix_by_definition(tokens: list[int], k: int) -> list[int]:
    """The longest end that occurred before, then step by step its most frequent continuation, of equals the first seen."""
    n = next((n for n in range(len(tokens) - 1, 0, -1) if occurrences(tokens[:-1], tokens[-n:])), 0)
    found, draft, share = tokens[len(tokens) - n :], [], 1.0
    while len(draft) < min(k, n):
        following = Counter(tokens[i + len(found)] for i in occurrences(tokens, found) if i + len(found) < len(tokens))
        if not following:
            break
        token, count = following.most_common(1)[0]
        share *= count / following.total()
        if share < 0.1:
            break
        draft.append(token)
        found = [*found, token]
    return draft


def occurrences(tokens: list[int], part: list[int]) -> list[int]:
    return [i for i in range(len(tokens) - len(part) + 1) if tokens[i : i + len(part)] == part]


@given(HISTORIES, st.integers(1, 8), st.lists(st.integers(1, 5), max_size=40))
def test_the_suffix_automaton_equals_the_scan(tokens: list[int], k: int, sizes: list[int]) -> None:
    index = SuffixIndex()
    for size in [*sizes, len(tokens)]:
        at = len(index)
        index.extend(tokens[at : at + size])
        assert index.propose(k) == suffix_by_definition(tokens[: len(index)], k)


def test_a_suffix_draft_is_no_longer_than_its_match_and_follows_the_majority() -> None:
    index = SuffixIndex()
    index.extend([1, 2, 7, 7, 1, 2, 8, 8, 1, 2, 8, 8, 1, 2])
    assert index.propose(8) == [8, 8, 1, 2]  # 1 2 8 8 1 2 occurred before, and this is all that followed
    index.extend([9, 2])
    assert index.propose(8) == [8]  # after 2: 8 twice, 7 and 9 once
