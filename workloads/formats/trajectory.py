"""Agent trajectories: a list of `role`/`content` messages (mini-swe-agent), or an object that holds one under `messages`,
`history` or `trajectory` (SWE-agent). Each assistant message was one request: what came before it is the prompt, which grows, and
all belong to one session.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from workloads import rows
from workloads.rows import Batch, Drop, Row, batches
from workloads.source import Source

_KEYS = ("messages", "history", "trajectory")


def matches(source: Source) -> bool:
    if source.kind != "json":
        return False
    return bool(_conversations(source.document))


def read(source: Source) -> Iterator[Batch]:
    found: list[Row | Drop] = []
    for session, conversation in enumerate(_conversations(source.document), 1):
        found += _requests(conversation, str(session))
    for batch in batches(iter(found)):
        batch.notes = ("each assistant message is one request; its line is its place in the conversation",)
        yield batch


def _conversations(document: Any) -> list[list[Any]]:
    """Each conversation of the document; empty where it holds none."""
    if isinstance(document, dict):
        document = next((document[key] for key in _KEYS if _is_conversation(document.get(key))), None)
    if _is_conversation(document):
        return [document]
    if isinstance(document, list) and document and all(map(_is_conversation, document)):
        return document
    return []


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in value)
    )


def _requests(conversation: list[Any], session: str) -> Iterator[Row | Drop]:
    messages = [{"role": m["role"], "content": m["content"]} for m in conversation]
    last: int | None = None
    for position, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        line = position + 1
        try:
            if position == 0:
                raise Drop("no_prompt")
            prompt = rows.messages(messages[:position])
        except Drop as drop:
            yield drop
            continue
        yield {
            "messages": prompt,
            "output_text": rows.text(message["content"]),
            "session_id": session,
            "parent": last,
            "line": line,
        }
        last = line
