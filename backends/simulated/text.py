"""A tokenizer without a model: every token is four characters, so text and tokens count the same for server and client.

Made-up output is `` 0a3 2ff`` and the like: each piece is one token, and encoding a whole output gives its tokens back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

PIECE = 4
WORDS = 1024
LEADS = " é語"  # one, two and three bytes in UTF-8
PIECES = [f"{lead}{word:03x}" for lead in LEADS for word in range(WORDS)]
IDS = {piece: index for index, piece in enumerate(PIECES)}
OTHERS = 30_000  # ids for pieces of the user's text


def encode(text: str) -> list[int]:
    return [_id(text[i : i + PIECE]) for i in range(0, len(text), PIECE)]


def _id(piece: str) -> int:
    known = IDS.get(piece)
    return len(PIECES) + crc32(piece.encode()) % OTHERS if known is None else known


def decode(token_ids: Sequence[int]) -> str:
    """Text of tokens; those of a user's text, whose characters are not kept, come out as `` ???``."""
    return "".join(PIECES[token] if token < len(PIECES) else " ???" for token in token_ids)


def encode_chat(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
    parts = [str(tool) for tool in tools or ()]
    parts += [f"{message['role']}: {message['content']}\n" for message in messages]
    return encode("".join(parts))


def output_ids(prompt_ids: Sequence[int], start: int, count: int, lead: int = 0) -> tuple[int, ...]:
    """Tokens `start`.. of the answer to a prompt: the same for every variant, as greedy decoding's are."""
    first = lead * WORDS
    seed = crc32(repr(prompt_ids[-8:]).encode()) + len(prompt_ids)
    return tuple(first + (seed + 37 * position) % WORDS for position in range(start, start + count))


def block_ids(prompt_ids: Sequence[int], block_tokens: int) -> tuple[int, ...]:
    """One id for each whole block of a prompt, which stands for all tokens up to its end."""
    ids, value = [], 0
    for end in range(block_tokens, len(prompt_ids) + 1, block_tokens):
        value = hash((value, tuple(prompt_ids[end - block_tokens : end])))
        ids.append(value)
    return tuple(ids)


def natural_length(prompt_ids: Sequence[int], mean_tokens: int) -> int:
    """Tokens after which the answer to a prompt ends by itself: uniform on 1 .. 2 · mean − 1, fixed for each prompt."""
    return 1 + crc32(repr(prompt_ids[-32:]).encode()) % (2 * mean_tokens - 1)
