"""Exact acceptance of the drafters that read only the token history, computed from recorded outputs without any engine.

The definition is the engine's: the history is the templated prompt and the output so far; the first output token comes from the
prompt's own pass and is no decode step; each later step proposes up to K tokens and emits those that agree with the recorded
output, and one more. Drafts past the end of the output count for nothing, so a step never emits more than is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.matchers import SuffixIndex
from workloads.types import Request, Trace

CONTEXT_BUCKETS = (512, 2048, 8192, 32768)
"""Upper ends (tokens, excluded) of the context buckets; the last bucket is open."""

_BLOCK_TOKENS = 1 << 20  # tokens looked at together; bounds memory
_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded greedy (or sampled) output: token ids of the templated prompt and of what followed."""

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    category: str | None = None


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Sums over all steps of one category and context bucket, for one setting of a drafter."""

    variant: str
    k: int
    min_n: int | None  # n-gram sizes; None for other drafters
    max_n: int | None
    category: str | None
    context_from: int  # tokens of the history at the step: in [context_from, context_to)
    context_to: int | None
    steps: int
    drafted_steps: int
    draft_tokens: int
    emitted_tokens: int

    @property
    def tau(self) -> float | None:
        """Tokens emitted per decode step; None without steps."""
        return self.emitted_tokens / self.steps if self.steps else None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tau": self.tau}


def record(
    trace: Trace,
    encode_prompt: Callable[[Request], Sequence[int]],
    encode: Callable[[str], Sequence[int]],
    end_id: int | None = None,
) -> list[Recorded]:
    """The requests with recorded output, tokenized. `encode_prompt` applies the chat template, `encode` adds no special tokens.

    `end_id` follows an answer that ended by itself: a text does not show that token, and an engine spends a step on it.
    """
    found = []
    for request, status in zip(trace.requests(), trace.values("source_status"), strict=True):
        if request.output_text:
            output = list(encode(request.output_text))
            if end_id is not None and _ended_itself(request, status, len(output)):
                output.append(end_id)
            found.append(Recorded(encode_prompt(request), output, request.category))
    return found


def _ended_itself(request: Request, status: str | None, tokens: int) -> bool:
    if status is None:
        return request.output_tokens == tokens + 1
    return status == "stop" and not request.sampling.get("stop")


def pool(parts: Sequence[Acceptance], *, by: Sequence[str] = ()) -> list[Acceptance]:
    """Sums of `parts` over categories and contexts, except those named in `by` ("category", "context")."""
    sums: dict[tuple[Any, ...], list[int]] = {}
    for part in parts:
        where = (
            part.category if "category" in by else None,
            *((part.context_from, part.context_to) if "context" in by else (0, None)),
        )
        key = (part.variant, part.k, part.min_n, part.max_n, *where)
        counts = (part.steps, part.drafted_steps, part.draft_tokens, part.emitted_tokens)
        sums[key] = [a + b for a, b in zip(sums.get(key, (0, 0, 0, 0)), counts, strict=True)]
    return [Acceptance(*key, *counts) for key, counts in sums.items()]


def ngram_acceptance(recorded: Sequence[Recorded], *, max_k: int = 8, max_n: int = 4) -> list[Acceptance]:
    """Prompt lookup (longest match first, earliest occurrence) for every K of 1..`max_k` and every range of sizes within
    1..`max_n`, by category and context bucket."""
    ranges = [(low, high) for high in range(1, max_n + 1) for low in range(1, high + 1)]
    total = _Sums([("ngram", low, high) for low, high in ranges], max_k)
    for block in _blocks(recorded):
        starts = _first_ends(block, max_n)
        agreed = [_agreement(block, start, max_k) for start in starts]
        for setting, (low, high) in enumerate(ranges):
            start = np.zeros_like(block.position)
            agree = np.zeros_like(block.position)
            for n in range(low, high + 1):  # the longest match overrides shorter ones
                found = starts[n - 1] > 0
                start[found] = starts[n - 1][found]
                agree[found] = agreed[n - 1][found]
            room = np.where(start > 0, block.position - start, 0)
            total.add(setting, block, agree, room)
    return total.parts()


def suffix_acceptance(recorded: Sequence[Recorded], *, max_k: int = 8) -> list[Acceptance]:
    """Suffix decoding (`backends.matchers.SuffixIndex`, its defaults) for every K of 1..`max_k`, by category and bucket."""
    total = _Sums([("suffix", None, None)], max_k)
    for block in _blocks(recorded):
        agree = np.zeros_like(block.position)
        room = np.zeros_like(block.position)
        for begin, output, end in zip(block.begins, block.outputs, block.ends, strict=True):
            index = SuffixIndex()
            tokens = block.tokens[begin:end].tolist()
            known = output - begin + 1
            index.extend(tokens[:known])
            for at in range(known, len(tokens)):
                draft = index.propose(max_k)
                room[begin + at] = len(draft)
                agree[begin + at] = _agreeing(draft, tokens[at : at + max_k])
                index.extend(tokens[at : at + 1])
        total.add(0, block, agree, room)
    return total.parts()


def _agreeing(draft: Sequence[int], actual: Sequence[int]) -> int:
    """Leading tokens of `draft` that `actual` has too."""
    agreed = 0
    while agreed < min(len(draft), len(actual)) and draft[agreed] == actual[agreed]:
        agreed += 1
    return agreed


@dataclass(frozen=True, slots=True)
class _Block:
    """Sequences laid end to end. Index 0 is unused, so that 0 can mean "none"."""

    tokens: _Ints
    position: _Ints  # [tokens] its own index
    end: _Ints  # [tokens] where its sequence ends
    sequence: _Ints  # [tokens]
    begins: list[int]
    outputs: list[int]  # index of each sequence's first output token
    ends: list[int]
    categories: list[str | None]


def _blocks(recorded: Sequence[Recorded]) -> Iterator[_Block]:
    part: list[Recorded] = []
    size = 0
    for item in recorded:
        part.append(item)
        size += len(item.prompt_ids) + len(item.output_ids)
        if size >= _BLOCK_TOKENS:
            yield _block(part)
            part, size = [], 0
    if part:
        yield _block(part)


def _block(part: Sequence[Recorded]) -> _Block:
    pieces = [np.zeros(1, np.int64)]
    begins, outputs, ends = [], [], []
    at = 1
    for item in part:
        begins.append(at)
        outputs.append(at + len(item.prompt_ids))
        at += len(item.prompt_ids) + len(item.output_ids)
        ends.append(at)
        pieces += [np.asarray(item.prompt_ids, np.int64), np.asarray(item.output_ids, np.int64)]
    lengths = np.subtract(ends, begins)
    sequence = np.concatenate([[0], np.repeat(np.arange(len(part)), lengths)])
    end = np.concatenate([[0], np.repeat(np.array(ends), lengths)])
    categories = [item.category for item in part]
    return _Block(np.concatenate(pieces), np.arange(at), end, sequence, begins, outputs, ends, categories)


def _first_ends(block: _Block, max_n: int) -> list[_Ints]:
    """For n of 1..`max_n`, [tokens]: for the history before each token, where the first occurrence of its last n tokens ended; 0
    where they did not occur before. Exact: n-grams are numbered by sorting, not hashed."""
    _, token = np.unique(block.tokens, return_inverse=True)
    token += 1  # 0 stands for "before the sequence"
    begin = np.array(block.begins)[block.sequence]
    name = block.sequence  # of the last n tokens before each position; equal names only within a sequence
    found = []
    for n in range(1, max_n + 1):
        before = np.roll(token, n)
        before[block.position - n < begin] = 0
        key = name * (int(token.max()) + 1) + before
        order = np.argsort(key, kind="stable")
        new = np.diff(key[order], prepend=-1) != 0
        group = np.cumsum(new) - 1
        name, first = np.empty_like(order), np.empty_like(order)
        name[order] = group
        first[order] = order[new][group]
        found.append(np.where((before > 0) & (first < block.position), first, 0))
    return found


def _agreement(block: _Block, start: _Ints, max_k: int) -> _Ints:
    """[tokens] how many tokens from each position on equal those from `start` on; no further than the history and the output."""
    agree = np.zeros_like(start)
    going = np.flatnonzero(start)
    for ahead in range(max_k):
        there, here = start[going] + ahead, going + ahead
        sound = (there < going) & (here < block.end[going])
        going, there, here = going[sound], there[sound], here[sound]
        going = going[block.tokens[there] == block.tokens[here]]
        agree[going] += 1
    return agree


class _Sums:
    """Steps and tokens by setting, K, category and context bucket."""

    def __init__(self, settings: Sequence[tuple[str, int | None, int | None]], max_k: int) -> None:
        self._settings = settings
        self._max_k = max_k
        self._cells: dict[tuple[int, int, str | None, int], _Ints] = {}

    def add(self, setting: int, block: _Block, agree: _Ints, room: _Ints) -> None:
        """Walk every sequence for each K. `agree` and `room` [tokens]: agreeing and available draft tokens at each position."""
        names = sorted(set(block.categories), key=str)
        category = np.array([names.index(name) for name in block.categories])
        begin = np.array(block.begins)
        context = np.searchsorted(CONTEXT_BUCKETS, block.position - begin[block.sequence], side="right")
        cell = category[block.sequence] * (len(CONTEXT_BUCKETS) + 1) + context
        left = block.end - block.position
        for k in range(1, self._max_k + 1):
            jump = np.minimum(np.minimum(agree, k) + 1, left)
            at = _visited(block, jump)
            drafted = np.minimum(room[at], np.minimum(k, left[at] - 1))
            for place, counts in enumerate(
                (np.ones(len(at), np.int64), drafted > 0, drafted, jump[at]),
            ):
                sums = np.bincount(cell[at], weights=counts, minlength=len(names) * (len(CONTEXT_BUCKETS) + 1))
                for index in np.flatnonzero(sums):
                    name, bucket = divmod(int(index), len(CONTEXT_BUCKETS) + 1)
                    self._cells.setdefault((setting, k, names[name], bucket), np.zeros(4, np.int64))[place] += int(sums[index])

    def parts(self) -> list[Acceptance]:
        edges = (0, *CONTEXT_BUCKETS, None)
        found = []
        for (setting, k, category, bucket), counts in sorted(self._cells.items(), key=lambda item: str(item[0])):
            variant, low, high = self._settings[setting]
            span = (edges[bucket] or 0, edges[bucket + 1])
            found.append(Acceptance(variant, k, low, high, category, *span, *map(int, counts)))
        return found


def _visited(block: _Block, jump: _Ints) -> _Ints:
    """Positions at which a decode step begins: from each sequence's second output token on, in jumps. All sequences walk together;
    those that have ended drop out."""
    at = np.array(block.outputs) + 1
    ends = np.array(block.ends)
    seen = [np.zeros(0, np.int64)]
    while True:
        alive = at < ends
        at, ends = at[alive], ends[alive]
        if not len(at):
            return np.concatenate(seen)
        seen.append(at)
        at = at + jump[at]
