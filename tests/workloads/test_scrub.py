"""A scrubbed trace: nothing that a person wrote, everything that a replay needs."""

import json
from pathlib import Path

from tests.workloads.traces import trace_of
from workloads.load import load_trace
from workloads.scrub import TEXT_BLOCK_CHARS, scrub

SYSTEM = "You are the assistant of Wonderland Ltd. " * 4


def original() -> dict[str, list[object]]:
    prompts = [SYSTEM + "My name is Alice Liddell", SYSTEM + "Where is the rabbit?", "curiouser and curiouser and curiouser"]
    return {
        "arrival_s": [0.0, 1.5, 2.0],
        "messages": [json.dumps([{"role": "user", "content": text}]) for text in prompts],
        "input_tokens": [50, None, 7],
        "output_tokens": [5, 6, 7],
        "output_text": ["Hello Alice Liddell", "down down down down", None],
        "sampling": ['{"temperature": 0.7, "stop": ["Liddell"]}', None, None],
        "session_id": ["alice", "alice", "bob"],
        "tenant": ["Wonderland", "Wonderland", None],
        "category": ["greeting", "question", "greeting"],
        "tools": ['[{"function": {"name": "find_rabbit"}}]', None, None],
    }


def test_no_word_of_the_original_survives(tmp_path: Path) -> None:
    scrub(trace_of(**original()), tmp_path / "out.jsonl")
    written = (tmp_path / "out.jsonl").read_text().lower()
    for word in ("alice", "liddell", "wonderland", "rabbit", "curiouser", "greeting", "down", "bob", "assistant"):
        assert word not in written


def test_lengths_arrivals_sessions_and_shared_prefixes_survive(tmp_path: Path) -> None:
    scrub(trace_of(**original()), tmp_path / "out.jsonl")
    trace = load_trace(tmp_path / "out.jsonl")
    assert (trace.format, trace.grade, trace.read, trace.kept) == ("native", "C", 3, 3)
    assert trace.arrivals_s.tolist() == [0.0, 1.5, 2.0]
    assert trace.values("output_tokens") == [5, 6, 7]
    sessions = trace.values("session_id")
    assert sessions[0] == sessions[1] != sessions[2]
    categories = trace.values("category")
    assert categories[0] == categories[2] != categories[1]
    assert trace.values("sampling") == [{"temperature": 0.7}, None, None]
    first, second, third = trace.values("prefix_blocks")
    shared = len(SYSTEM) // TEXT_BLOCK_CHARS
    assert first[:shared] == second[:shared]
    assert not set(third or ()) & set(first)


def test_estimated_lengths_say_so_and_repetition_is_a_share_of_word_pairs(tmp_path: Path) -> None:
    scrub(trace_of(**original()), tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row.get("input_tokens_estimated") for row in rows] == [None, True, None]
    assert rows[1]["output_repetition"] == round(2 / 3, 4)  # down-down three times, of which two repeat
    assert rows[0]["has_tools"] is True


def test_block_ids_are_numbered_in_order_of_appearance(tmp_path: Path) -> None:
    blocks = trace_of(prefix_blocks=[[77, 2**60], [77, 5]], block_size=[16, 16], input_tokens=[32, 32])
    scrub(blocks, tmp_path / "out.jsonl")
    assert load_trace(tmp_path / "out.jsonl").values("prefix_blocks") == [[0, 1], [0, 2]]
