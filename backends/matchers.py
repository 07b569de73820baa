"""Prompt lookup (n-gram) drafting as a pure function of the token history; engine and offline analysis use the same code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

DEFAULT_MIN_N = 2
DEFAULT_MAX_N = 4

Match = Literal["earliest", "latest"]


class NgramIndex:
    """Where every n-gram of a growing token history was followed by what; one token costs `max_n - min_n + 1` dict entries.

    An n-gram enters the index only once a token follows it, so the history's own end never matches itself.
    """

    def __init__(self, min_n: int = DEFAULT_MIN_N, max_n: int = DEFAULT_MAX_N, match: Match = "earliest") -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"n-gram sizes need 1 <= min_n <= max_n, got {min_n} and {max_n}")
        self._sizes = range(max_n, min_n - 1, -1)
        self._latest = match == "latest"
        self._tokens: list[int] = []
        self._continues_at: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after it

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        history, seen = self._tokens, self._continues_at
        for token in tokens:
            at = len(history)  # the n-grams that end just before `token` have a continuation from now on
            for n in self._sizes:
                if n > at:
                    continue
                gram = tuple(history[at - n :])
                if self._latest:
                    seen[gram] = at
                else:
                    seen.setdefault(gram, at)
            history.append(token)

    def propose(self, k: int) -> list[int]:
        """Up to `k` tokens that followed the longest earlier occurrence of the history's end; empty without a match."""
        history = self._tokens
        for n in self._sizes:
            if n < len(history) and (at := self._continues_at.get(tuple(history[-n:]))) is not None:
                return history[at : at + k]
        return []


def propose_ngram(
    tokens: Sequence[int], k: int, min_n: int = DEFAULT_MIN_N, max_n: int = DEFAULT_MAX_N, match: Match = "earliest"
) -> list[int]:
    """Draft of up to `k` tokens for the history `tokens`: longest n first, then the earliest (as vLLM) or latest match.

    Builds the index anew: use one `NgramIndex` where the history grows step by step.
    """
    index = NgramIndex(min_n, max_n, match)
    index.extend(tokens)
    return index.propose(k)


MAX_COUNTED_SUFFIXES = 64
"""Suffixes of the history whose counts one token updates; only highly repetitive text has more that occurred before."""


class SuffixIndex:
    """Suffix automaton of a growing token history: drafts what most often followed the longest end that occurred before.

    The draft's length varies: at most `spec_factor` times the length of the match, and no further than the share of earlier
    continuations that went the same way stays at `min_share` or more (the rules of suffix decoding, arXiv 2411.04975, on one
    request's own history; automaton after Blumer et al. 1985). A draft for a smaller `k` is a prefix of that for a larger one.
    Time and memory per token are constant on average.
    """

    def __init__(self, spec_factor: float = 1.0, min_share: float = 0.1) -> None:
        self._spec_factor = spec_factor
        self._min_share = min_share
        # One entry a state; a state stands for token strings that end at the same places in the history.
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]  # state of the longest suffix that ends at more places
        self._longest: list[int] = [0]  # tokens of the state's longest string
        self._count: list[int] = [0]  # places at which its strings end
        self._last = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._append(token)

    def propose(self, k: int) -> list[int]:
        """Up to `k` tokens; empty where no end of the history occurred before."""
        state = self._link[self._last]
        if state <= 0:
            return []
        draft: list[int] = []
        share = 1.0
        limit = min(k, int(self._spec_factor * self._longest[state]))
        while len(draft) < limit and (ways := self._next[state]):
            counts = {token: self._count[target] for token, target in ways.items()}
            token = max(counts, key=counts.__getitem__)  # the first seen of equals
            share *= counts[token] / sum(counts.values())
            if share < self._min_share:
                break
            draft.append(token)
            state = ways[token]
        return draft

    def _append(self, token: int) -> None:
        new = self._state({}, self._longest[self._last] + 1, 0)
        at = self._last
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = new
            at = self._link[at]
        self._link[new] = 0 if at < 0 else self._split(at, token)
        self._last = new
        self._size += 1
        for _ in range(MAX_COUNTED_SUFFIXES):
            self._count[new] += 1
            new = self._link[new]
            if new <= 0:
                break

    def _split(self, at: int, token: int) -> int:
        """The state of exactly the longest string of `at` and `token`, cut out of a larger one where needed."""
        target = self._next[at][token]
        if self._longest[target] == self._longest[at] + 1:
            return target
        clone = self._state(dict(self._next[target]), self._longest[at] + 1, self._count[target])
        self._link[clone] = self._link[target]
        self._link[target] = clone
        while at >= 0 and self._next[at].get(token) == target:
            self._next[at][token] = clone
            at = self._link[at]
        return clone

    def _state(self, ways: dict[int, int], longest: int, count: int) -> int:
        self._next.append(ways)
        self._link.append(-1)
        self._longest.append(longest)
        self._count.append(count)
        return len(self._next) - 1
