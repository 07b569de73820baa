"""OpenAI batch files: requests (`custom_id`, `url`, `body`), and results (`custom_id`, `response`) where they follow in the same
file (`cat input.jsonl output.jsonl > both.jsonl`). A result is joined to its request by `custom_id`; an id that several requests
carry joins nothing. Batches have no times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from workloads import rows
from workloads.rows import Batch, Drop, Row, batches
from workloads.source import TRUNCATED, Source


def matches(source: Source) -> bool:
    return any("custom_id" in sample and ("body" in sample or "response" in sample) for sample in source.samples)


def read(source: Source) -> Iterator[Batch]:
    requests: list[tuple[Any, Row | Drop]] = []
    results: dict[Any, Mapping[str, Any]] = {}
    for number, record in source.records():
        if record is TRUNCATED:
            requests.append((None, Drop("truncated_last_line")))
        elif not isinstance(record, dict):
            raise source.error(number, "is no JSON object; correct or remove the line")
        elif "body" in record:
            requests.append((_id(record), _request(record, number)))
        else:
            results[_id(record)] = record
    uses = Counter(key for key, _ in requests)
    found = [_joined(row, results[key]) if key in results and uses[key] == 1 else row for key, row in requests]
    found += [Drop("result_without_request") for key in results if not uses[key]]
    repeated = sum(1 for key in results if uses[key] > 1)
    for batch in batches(iter(found)):
        batch.notes = (f"{repeated} results not joined: several requests carry their custom_id",) if repeated else ()
        yield batch


def _id(record: Mapping[str, Any]) -> str:
    return str(record.get("custom_id"))


def _request(record: Mapping[str, Any], number: int) -> Row | Drop:
    url, body = record.get("url") or "/v1/chat/completions", record["body"]
    if not isinstance(url, str) or not url.endswith(("/chat/completions", "/completions", "/responses")):
        kind = str(url).rstrip("/").rsplit("/", 1)[-1]
        return Drop("embeddings_url" if kind == "embeddings" else "other_url")
    if not isinstance(body, dict):
        return Drop("no_body")
    try:
        return {**rows.request_body(body), "line": number}
    except Drop as drop:
        return drop


def _joined(row: Row | Drop, result: Mapping[str, Any]) -> Row | Drop:
    if isinstance(row, Drop):
        return row
    response = result.get("response") or {}
    answer = response.get("body") or {} if isinstance(response, dict) else None
    if result.get("error") or not isinstance(answer, dict) or response.get("status_code", 200) != 200:
        return Drop("failed_upstream")
    try:
        return {**row, **completion(answer)}
    except Drop as drop:
        return drop


def completion(answer: Mapping[str, Any]) -> Row:
    """Text and token counts of an API response."""
    usage = answer.get("usage") if isinstance(answer.get("usage"), dict) else {}
    row: Row = {
        "input_tokens": rows.input_count(rows.first_of(usage or {}, "prompt_tokens", "input_tokens")),
        "output_tokens": rows.output_count(rows.first_of(usage or {}, "completion_tokens", "output_tokens")),
    }
    choices = answer.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        message = choices[0].get("message")
        content = message.get("content") if isinstance(message, dict) else choices[0].get("text")
        row["output_text"] = rows.text(content)
        row["source_status"] = rows.text(choices[0].get("finish_reason"))
    return {name: value for name, value in row.items() if value is not None}
