"""Prompt sets of speculative-decoding benchmarks: Spec-Bench and MT-bench (`turns`, or a list under `prompt`), SPEED-Bench
(`question_id`, `messages`), HumanEval (`task_id`, `prompt`, `entry_point`; completion style), GSM8K (`question`, `answer`). The first
turn of each, since later turns need the target's own answers. No arrivals; reference answers are not taken for recorded output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workloads import rows
from workloads.rows import Drop, Row, by_record
from workloads.source import Source

_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"


def matches(source: Source) -> bool:
    return any(_is_prompt(sample) for sample in source.samples)


def _is_prompt(sample: Mapping[str, Any]) -> bool:
    return (
        isinstance(sample.get("turns"), list)
        or ("prompt_id" in sample and isinstance(sample.get("prompt"), list))
        or {"question_id", "messages"} <= sample.keys()
        or {"task_id", "prompt", "entry_point"} <= sample.keys()
        or {"question", "answer"} <= sample.keys()
    )


def row(record: Mapping[str, Any]) -> Row:
    category = rows.text(record.get("category"))
    if isinstance(record.get("messages"), list):
        messages = rows.messages(record["messages"])
        return {"messages": [_checked(messages[0])], "category": category}
    if "entry_point" in record:
        prompt = rows.text(record.get("prompt"))
        if prompt is None:
            raise Drop("no_prompt")
        return {"prompt": prompt, "category": category or "code"}
    turns = rows.first_of(record, "turns", "prompt")
    question = turns[0] if isinstance(turns, list) and turns else record.get("question")
    question = question.get("content") if isinstance(question, dict) else question
    if not isinstance(question, str) or not question.strip():
        raise Drop("no_prompt")
    return {"messages": [_checked({"role": "user", "content": question})], "category": category}


def _checked(message: dict[str, Any]) -> dict[str, Any]:
    if isinstance(message.get("content"), str) and _PLACEHOLDER in message["content"]:
        raise Drop("placeholder_text")
    return message


read = by_record(row)
