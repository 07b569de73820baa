"""Agent trajectories: a list of `role`/`content` messages (mini-swe-agent), or objects that hold one under `messages`, `history` or
`trajectory` (SWE-agent), alone or one a line. Each assistant message was one request: what came before it is the prompt, which
grows, and all belong to one session.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from workloads import rows
from workloads.rows import Batch, Drop, Row, batches
from workloads.source import TRUNCATED, Source

_KEYS = ("messages", "history", "trajectory")
_SENT = ("role", "content", "name", "tool_calls", "tool_call_id")
_MARKS = {"info", "instance_id", "traj_id", "trajectory_format", "exit_status", "history", "trajectory"}
"""One of them tells a trajectory from a chat that is one line of JSON too."""


def matches(source: Source) -> bool:
    if source.kind == "json":
        return bool(_conversations(source.document))
    return any(_MARKS & sample.keys() and _conversations(sample) for sample in source.samples)


def read(source: Source) -> Iterator[Batch]:
    found: list[Row | Drop] = []
    if source.kind == "json":
        conversations = _conversations(source.document)
    else:
        conversations = []
        for number, record in source.records():
            conversation = _conversations(record)
            if conversation:
                conversations += conversation
            elif record is TRUNCATED:
                found.append(Drop("truncated_last_line"))
            elif isinstance(record, dict):
                found.append(Drop("no_conversation"))
            else:
                raise source.error(number, "is no JSON object; correct or remove the line")
    for session, conversation in enumerate(conversations, 1):
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
    messages = [{key: m[key] for key in _SENT if m.get(key) is not None or key == "content"} for m in conversation]
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
