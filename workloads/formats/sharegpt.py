"""Conversations: ShareGPT (`conversations`, in older dumps `items`, of `from`/`value`), its `role`/`content` variants,
LMSYS-Chat-1M and WildChat rows (`conversation`), and `messages` that end with the assistant's, as JSON array, JSONL or Parquet.

One request for each conversation: everything up to the first user turn, with the reply to it as recorded output, as vLLM's and
SGLang's benchmarks have it. Fields that identify people (hashed addresses, headers, places) are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workloads import rows
from workloads.rows import Drop, Row, by_record
from workloads.source import Source

_ROLES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
}


def matches(source: Source) -> bool:
    return any(_is_conversation(sample) for sample in source.samples)


def _is_conversation(sample: Mapping[str, Any]) -> bool:
    turns = _turns(sample)
    if not isinstance(turns, list) or "body" in sample:
        return False
    if "messages" not in sample:
        return True
    last = turns[-1] if turns else None
    return (
        isinstance(last, dict)
        and last.get("role") == "assistant"
        and not {"max_tokens", "output", "output_text"} & sample.keys()
    )


def _turns(record: Mapping[str, Any]) -> Any:
    return rows.first_of(record, "conversations", "conversation", "items", "messages")


def row(record: Mapping[str, Any]) -> Row:
    turns = _turns(record)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise Drop("bad_conversation")
    messages = [_message(turn) for turn in turns]
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise Drop("no_user_turn")
    if not messages[first]["content"]:
        raise Drop("no_prompt")
    prompt = [message for message in messages[:first] if message["role"] == "system"] + [messages[first]]
    reply = messages[first + 1] if first + 1 < len(messages) and messages[first + 1]["role"] == "assistant" else None
    return {
        "time": rows.first_of(record, "timestamp", "created_at", "tstamp"),
        "messages": prompt,
        "output_text": (reply["content"] or None) if reply else None,
        "category": rows.text(record.get("category")),
    }


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    role = rows.first_of(turn, "from", "role", "user")
    content = rows.first_of(turn, "value", "content", "text")
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise Drop("unknown_role")
    if not isinstance(content, str | None):
        raise Drop("bad_conversation")
    return {"role": _ROLES[role.lower()], "content": content or ""}


read = by_record(row)
