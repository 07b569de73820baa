"""SGLang request logs (`--log-requests --log-requests-format json`): events `request.received` and `request.finished`. One
request for each `rid`; its events are joined. Levels 0 and 1 hold no text. On standard output they stand among the server's other
lines, which are no rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from workloads import rows
from workloads.rows import Batch, Drop, Row, batches
from workloads.source import TRUNCATED, Source

LOG_TEXT_LIMIT = 2048
"""Characters at which level 2 cuts texts; a text this long may be cut, so it is not taken."""

_EVENT = re.compile(rb'\{.*"event": ?"request\.(received|finished)"')


def matches(source: Source) -> bool:
    return source.kind in ("json_lines", "text") and b'"rid"' in source.head and _EVENT.search(source.head) is not None


def read(source: Source) -> Iterator[Batch]:
    open_requests: dict[str, tuple[int, dict[str, Any]]] = {}
    found: list[Row | Drop] = []
    for number, record in _records(source):
        if record is TRUNCATED:
            found.append(Drop("truncated_last_line"))
        elif not isinstance(record, dict):
            raise source.error(number, "is no JSON object; correct or remove the line")
        elif record.get("event") == "request.received":
            rid = str(record.get("rid"))
            if rid in open_requests:
                found.append(_safely(*open_requests[rid]))
            open_requests[rid] = number, {"received": record}
        elif record.get("event") == "request.finished":
            line, events = open_requests.pop(str(record.get("rid")), (number, {}))
            found.append(_safely(line, {**events, "finished": record}))
        else:
            found.append(Drop("other_event"))
    found += [_safely(*request) for request in open_requests.values()]
    return batches(iter(found))


def _records(source: Source) -> Iterator[tuple[int, Any]]:
    for number, line in source.lines():
        event = _EVENT.search(line)
        if event or line.lstrip()[:1] == b"{":
            yield number, source.parse(number, line[event.start() if event else 0 :])


def _safely(line: int, events: Mapping[str, Mapping[str, Any]]) -> Row | Drop:
    try:
        return {**_row(events), "line": line}
    except Drop as drop:
        return drop


def _row(events: Mapping[str, Mapping[str, Any]]) -> Row:
    received, finished = events.get("received", {}), events.get("finished", {})
    asked = {**_object(finished, "obj"), **_object(received, "obj")}
    out = _object(finished, "out")
    meta = _object(out, "meta_info")
    reason = _object(meta, "finish_reason").get("type")
    if reason == "abort":
        raise Drop("failed_upstream")
    params = _object(asked, "sampling_params")
    latency = meta.get("e2e_latency")
    row: Row = {
        "time": received.get("timestamp") or _started(finished, latency),
        "input_tokens": rows.input_count(meta.get("prompt_tokens")),
        "output_tokens": rows.output_count(meta.get("completion_tokens")),
        "output_text": _whole(out.get("text")),
        "max_tokens": rows.limit_of(params.get("max_new_tokens")),
        "sampling": rows.sampling_of(params),
        "source_status": rows.text(reason),
        "source_latency_s": float(latency) if isinstance(latency, int | float) else None,
    }
    if (prompt := _whole(asked.get("text"))) is not None:
        row["prompt"] = prompt
    elif isinstance(asked.get("input_ids"), list):
        row["token_ids"] = rows.token_list(asked["input_ids"])
    return row


def _object(record: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def _whole(value: Any) -> str | None:
    found = rows.text(value)
    return found if found is not None and len(found) < LOG_TEXT_LIMIT else None


def _started(finished: Mapping[str, Any], latency: Any) -> Any:
    """When a request began of which only the end was logged: end - latency, in ISO; the end where it cannot be told."""
    from workloads.times import iso_ns, iso_text

    end = iso_ns(str(finished.get("timestamp")))
    if end is None or not isinstance(latency, int | float):
        return finished.get("timestamp")
    return iso_text(end - round(latency * 1e9))
