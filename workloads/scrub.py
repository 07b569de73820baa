"""A trace that can be shared: lengths, arrivals, prefix structure, how repetitive each text is; no text, no names."""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from workloads.types import Trace

KEPT = ("arrival_s", "input_tokens", "output_tokens", "max_tokens", "block_size", "images")
"""Columns that are copied as they are."""

SAMPLING_KEPT = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "n")
"""Sampling parameters that are numbers; stop strings and the like are left out."""

TEXT_BLOCK_CHARS = 64


def scrub(trace: Trace, path: Path) -> None:
    """Write `trace` to `path` as native JSONL without anything that was written by a person.

    Texts leave the ids of their leading blocks (numbered in order of appearance, so that only equality can be seen) and the share
    of their words that stood in them before; sessions, tenants and categories become numbers. Lines that had no token count
    get an estimate of a quarter of the characters, marked as such.
    """
    salt = secrets.token_bytes(16)  # forgotten afterwards
    names: dict[tuple[str, Any], int] = {}
    lines = [orjson.dumps(_line(row, salt, names)) for row in _rows(trace)]
    path.write_bytes(b"\n".join(lines) + b"\n")


def _rows(trace: Trace) -> list[dict[str, Any]]:
    columns = {name: trace.values(name) for name in trace.table.column_names}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _line(row: dict[str, Any], salt: bytes, names: dict[tuple[str, Any], int]) -> dict[str, Any]:
    line: dict[str, Any] = {name: row[name] for name in KEPT if row.get(name) is not None}
    for name in ("session_id", "tenant", "category"):
        if row.get(name) is not None:
            line[name] = f"{name.removesuffix('_id')} {names.setdefault((name, row[name]), len(names))}"
    sampling = {k: v for k, v in (row.get("sampling") or {}).items() if k in SAMPLING_KEPT and isinstance(v, int | float)}
    if sampling:
        line["sampling"] = sampling
    text = _prompt_text(row)
    if row.get("prefix_blocks"):
        line["prefix_blocks"] = [names.setdefault(("block", block), len(names)) for block in row["prefix_blocks"]]
    elif text:
        line["prefix_blocks"] = [names.setdefault(("text", digest), len(names)) for digest in _blocks(text, salt)]
    if text and "input_tokens" not in line:
        line |= {"input_tokens": max(1, len(text) // 4), "input_tokens_estimated": True}
    if text:
        line["input_repetition"] = _repetition(text.split())
    if row.get("output_text"):
        words = row["output_text"].split()
        line["output_repetition"] = _repetition(words, known=text.split())
        if "output_tokens" not in line:
            line |= {"output_tokens": max(1, len(row["output_text"]) // 4), "output_tokens_estimated": True}
    for name in ("tools", "response_format"):
        if row.get(name) is not None:
            line[f"has_{name}"] = True
    return line | {"content_grade": "C"}


def _prompt_text(row: dict[str, Any]) -> str:
    if row.get("messages") is not None:
        return orjson.dumps(row["messages"]).decode()
    return row.get("prompt") or " ".join(map(str, row.get("token_ids") or ()))


def _blocks(text: str, salt: bytes) -> list[bytes]:
    running, found = hashlib.blake2b(salt, digest_size=16), []
    for at in range(0, len(text) - TEXT_BLOCK_CHARS + 1, TEXT_BLOCK_CHARS):
        running.update(text[at : at + TEXT_BLOCK_CHARS].encode())
        found.append(running.digest())
    return found


def _repetition(words: Sequence[str], known: Sequence[str] = ()) -> float:
    """Share of the pairs of neighbouring words that occurred before, in the text itself or in `known`."""
    seen = set(itertools.pairwise(known))
    repeated = 0
    for pair in itertools.pairwise(words):
        repeated += pair in seen
        seen.add(pair)
    return round(repeated / max(len(words) - 1, 1), 4)
