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
