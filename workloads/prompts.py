"""Text for traces that record lengths only: real prompts of a pool on the recorded arrivals, at the recorded lengths.

A prompt is one question of the pool, after as much running text of the pool as its recorded length needs. Prefix blocks become
text that depends on the block id alone, so that requests which shared blocks share the same leading text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from workloads.load import load_trace
from workloads.types import SCHEMA, ContentGrade, Trace, WorkloadError

POOLS = ("chat", "code", "reasoning", "grounded")
RANDOM = "random"
"""Asked for by this name only: words of the pools in random order, graded C."""

_FOLDER = Path(__file__).parent / "pools"

Encode = Callable[[str], Sequence[int]]
"""Token ids of plain text under the target's tokenizer, without special tokens."""


def attach_prompts(trace: Trace, pool: str, encode: Encode, *, seed: int, template_tokens: int = 0) -> Trace:
    """`trace` with a user message for each row, of `input_tokens` tokens (less `template_tokens`, what the chat template adds)
    under `encode`, or of the question's own length where none is recorded. `category` becomes the pool's.

    Args:
        pool: a bundled pool, `random`, or the path of any trace that holds prompts.

    Raises:
        WorkloadError: no such pool, or it holds no text.
    """
    names = POOLS if pool == RANDOM else (pool,)
    questions = [question for name in names for question in _questions(name)]
    text = _RunningText([question for question, _ in questions], encode, seed if pool == RANDOM else None)
    order = np.random.default_rng(seed).permutation(len(trace)) % len(questions)
    lengths, blocks = trace.values("input_tokens"), trace.values("prefix_blocks")
    sizes = trace.values("block_size")
    messages, categories = [], []
    for row in range(len(trace)):
        question, category = questions[order[row]]
        wanted = None if lengths[row] is None else max(1, lengths[row] - template_tokens)
        if pool == RANDOM:
            content = text.start(f"row {seed} {row}", wanted or 128)
        elif wanted is None:
            content = question
        else:
            content = _prompt(text, question, wanted, blocks[row] or (), sizes[row], f"row {seed} {row}")
        messages.append(orjson.dumps([{"role": "user", "content": content}]).decode())
        categories.append(category or pool)
    grade: ContentGrade = "C" if pool == RANDOM else "B"
    reason = "text made up of random words" if grade == "C" else f"recorded arrivals and lengths, prompts of the pool '{pool}'"
    paired = trace.with_column("messages", messages)
    return paired.with_column(
        "category",
        pa.array(categories, SCHEMA.field("category").type),
        grade=grade,
        grade_reason=reason,
        notes=(*trace.notes, f"prompts of the pool '{pool}' (seed {seed})"),
    )


def _prompt(text: _RunningText, question: str, wanted: int, blocks: Sequence[int], size: int | None, key: str) -> str:
    """Leading text and the question, together `wanted` tokens; a question that is longer by itself is cut from the front, where
    its context stands, and the ask at the end stays."""
    asked = text.measure(question)
    if asked >= wanted:
        return text.cut(question, wanted)
    room = wanted - asked - 1  # the line break between
    parts = []
    for block in blocks if size else ():
        if room <= 0:
            break
        parts.append(text.start(f"block {block}", min(size or 0, room)))
        room -= min(size or 0, room)
    if room > 0:
        parts.append(text.start(key, room))
    return "".join(parts) + "\n" + question


@dataclass
class _Piece:
    text: str  # a word with the white space before it: tokenizers split there, so tokens of pieces add up
    tokens: int


class _RunningText:
    """The pool's texts end to end, to take stretches of a given token length from."""

    def __init__(self, texts: Sequence[str], encode: Encode, shuffle_seed: int | None) -> None:
        self._encode = encode
        self._known: dict[str, int] = {}
        words = [word for text in texts for word in _words("\n\n" + text)]
        if shuffle_seed is not None:
            words = [words[i] for i in np.random.default_rng(shuffle_seed).permutation(len(words))]
        self._pieces = [_Piece(word, self.measure(word)) for word in words]
        self._cache: dict[tuple[str, int], str] = {}

    def measure(self, text: str) -> int:
        if text not in self._known:
            self._known[text] = len(self._encode(text))
        return self._known[text]

    def start(self, key: str, tokens: int) -> str:
        """`tokens` tokens of text from a place that `key` alone decides (a fixed hash, equal in every process)."""
        if (key, tokens) not in self._cache:
            digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
            self._cache[key, tokens] = self._take(int.from_bytes(digest, "big") % len(self._pieces), tokens)
        return self._cache[key, tokens]

    def _take(self, at: int, tokens: int) -> str:
        taken, tried = [], 0
        while tokens > 0 and tried < len(self._pieces):
            piece = self._pieces[at % len(self._pieces)]
            at += 1
            if 0 < piece.tokens <= tokens:
                taken.append(piece.text)
                tokens -= piece.tokens
                tried = 0
            else:
                tried += 1  # too long for the rest: the next that fits
        return "".join(taken)

    def cut(self, text: str, tokens: int) -> str:
        """The last `tokens` tokens' worth of words of `text`, at least one word."""
        kept: list[str] = []
        for word in reversed(_words(text)):
            tokens -= self.measure(word)
            if tokens < 0 and kept:
                break
            kept.append(word)
        return "".join(reversed(kept)).lstrip()


def _words(text: str) -> list[str]:
    return re.findall(r"\s*\S+", text)


def _questions(pool: str) -> list[tuple[str, str | None]]:
    """(prompt as plain text, category) of each prompt of the pool."""
    path = _FOLDER / f"{pool}.jsonl" if pool in POOLS else Path(pool)
    if pool not in POOLS and not path.exists():
        raise WorkloadError(
            f"--prompts {pool}: no such pool; choose from {', '.join(POOLS)}, {RANDOM}, or give a file of prompts"
        )
    trace = load_trace(path)
    found = [(_plain(request.messages, request.prompt), request.category) for request in trace.requests()]
    usable = [(text, category) for text, category in found if text.strip()]
    if not usable:
        raise WorkloadError(f"--prompts {pool}: holds no prompt with text; give a file with prompt or messages")
    return usable


def _plain(messages: Sequence[Any] | None, prompt: str | None) -> str:
    if prompt is not None:
        return prompt
    contents = [message.get("content") for message in messages or ()]
    return "\n\n".join(content for content in contents if isinstance(content, str))
