"""Rows as real tools write them, with the oddities of each: known answers, one format at a time."""

import gzip
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from workloads.load import load_trace
from workloads.types import Trace, WorkloadError

USER = {"role": "user", "content": "hi"}


def read(tmp_path: Path, rows: list[Any] | str) -> Trace:
    path = tmp_path / "trace"
    path.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
    return load_trace(path)


# Langfuse


GENERATION = {
    "id": "o1",
    "trace_id": "t1",
    "type": "GENERATION",
    "start_time": "2024-05-29 13:46:19.963000",
    "end_time": "2024-05-29 13:46:21.463000",
    "model_parameters": {"temperature": 0.5, "max_tokens": 64},
    "usage_details": {"input": 12, "output": 34, "total": 46},
    "input": [USER],
    "output": {"role": "assistant", "content": "hello"},
    "level": "DEFAULT",
}


def test_langfuse_generations_are_requests_and_spans_and_errors_are_not(tmp_path: Path) -> None:
    rows = [GENERATION, {**GENERATION, "type": "SPAN"}, {**GENERATION, "level": "ERROR"}]
    trace = read(tmp_path, rows)
    assert (trace.format, dict(trace.dropped)) == ("langfuse", {"not_a_generation": 1, "failed_upstream": 1})
    (request,) = trace.requests()
    assert (request.input_tokens, request.output_tokens, request.output_text) == (12, 34, "hello")
    assert (request.sampling, request.max_tokens, request.session_id) == ({"temperature": 0.5}, 64, "t1")
    assert trace.values("source_latency_s") == [1.5]


def test_langfuse_ui_export_has_camel_case_and_json_as_text(tmp_path: Path) -> None:
    row = {
        "id": "o1", "traceId": "t1", "type": "GENERATION", "startTime": "2024-05-29T13:46:19.963Z",
        "endTime": "2024-05-29T13:46:20.963Z", "modelParameters": '{"temperature": 0}', "usageDetails": {},
        "promptTokens": 7, "completionTokens": 9, "input": json.dumps({"messages": [USER]}),
        "output": json.dumps([{"role": "assistant", "content": "yes"}]), "sessionId": "s", "userId": "u",
    }  # fmt: skip
    (request,) = read(tmp_path, json.dumps([row])).requests()
    assert (request.messages, request.output_text, request.input_tokens, request.output_tokens) == ([USER], "yes", 7, 9)
    assert (request.session_id, request.sampling) == ("s", {"temperature": 0})


def test_a_langfuse_csv_may_hold_a_prompt_longer_than_python_grants_a_field(tmp_path: Path) -> None:
    prompt = "x" * 200_000
    text = f'id,trace_id,type,start_time,input,output\n1,t,GENERATION,2024-05-29 13:46:19.9,"{prompt}","a\n""b"""\n'
    (request,) = read(tmp_path, text).requests()
    assert (request.prompt, request.output_text) == (prompt, 'a\n"b"')
    path = tmp_path / "cut.csv.gz"
    path.write_bytes(gzip.compress(text.encode() * 40, 0)[:3_000_000])
    with pytest.raises(WorkloadError, match=r"cut.csv.gz:\d+: cannot be read as CSV"):
        load_trace(path)


# Conversations


def test_lmsys_and_wildchat_parquet_give_the_first_exchange_and_nothing_about_the_person(tmp_path: Path) -> None:
    moment = datetime(2023, 4, 9, 0, 2, 53, tzinfo=UTC)
    turns = [
        {"content": "Hey", "role": "user", "hashed_ip": "secret-ip", "timestamp": None, "turn_identifier": 1},
        {"content": "Hello!", "role": "assistant", "hashed_ip": None, "timestamp": moment, "turn_identifier": 1},
        {"content": "Bye", "role": "user", "hashed_ip": "secret-ip", "timestamp": None, "turn_identifier": 2},
    ]
    rows = [{"conversation_hash": "h", "timestamp": moment, "conversation": turns, "hashed_ip": "secret-ip", "turn": 2}]
    rows.append({**rows[0], "timestamp": moment.replace(minute=3), "conversation": turns[1:]})
    path = tmp_path / "wild"
    pq.write_table(pa.Table.from_pylist(rows), path)
    trace = load_trace(path)
    assert (trace.format, trace.read, trace.arrivals_s.tolist()) == ("sharegpt", 2, [0.0, 60.0])
    first, second = trace.requests()
    assert (first.messages, first.output_text) == ([{"role": "user", "content": "Hey"}], "Hello!")
    assert (second.messages, second.output_text) == ([{"role": "user", "content": "Bye"}], None)  # begins with the answer
    assert "secret-ip" not in str(trace.table.to_pylist())


def test_sharegpt_parquet_equals_the_same_rows_as_json(tmp_path: Path) -> None:
    rows = [
        {"id": f"c{i}", "conversations": [{"from": "human", "value": f"q{i}"}, {"from": "gpt", "value": f"a{i}"}]}
        for i in range(5)
    ]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    from_parquet, from_array = load_trace(path), read(tmp_path, json.dumps(rows))
    assert from_parquet.table == from_array.table
    assert from_parquet.values("output_text") == ["a0", "a1", "a2", "a3", "a4"]


@pytest.mark.parametrize(
    "conversation",
    [
        {"items": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversation": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "model": "m"},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    ],
)
def test_conversations_go_by_several_names(tmp_path: Path, conversation: dict[str, Any]) -> None:
    trace = read(tmp_path, [conversation])
    (request,) = trace.requests()
    assert (trace.format, request.messages, request.output_text) == ("sharegpt", [{"role": "user", "content": "q"}], "a")


def test_a_bare_api_body_keeps_the_whole_conversation(tmp_path: Path) -> None:
    messages = [USER, {"role": "assistant", "content": "a"}, USER]
    trace = read(tmp_path, [{"model": "m", "messages": messages, "max_tokens": 3}])
    assert (trace.format, trace.values("messages")) == ("native", [messages])


# Prompt sets


@pytest.mark.parametrize(
    "row",
    [
        {"question_id": 81, "category": "writing", "turns": ["q", "then"]},
        {"prompt_id": 81, "category": "writing", "prompt": ["q", "then"], "reference": []},
        {"question_id": "a", "category": "writing", "turns": [{"content": "q"}]},
        {"question_id": "a" * 32, "category": "writing", "messages": [{"role": "user", "content": "q"}]},
    ],
)
def test_prompt_sets_give_the_first_turn(tmp_path: Path, row: dict[str, Any]) -> None:
    trace = read(tmp_path, [row])
    (request,) = trace.requests()
    assert (trace.format, request.category, request.output_text) == ("prompt_set", "writing", None)
    assert request.messages == [{"role": "user", "content": "q"}]


def test_placeholders_of_speed_bench_are_no_prompts(tmp_path: Path) -> None:
    text = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    row = {"question_id": "a", "category": "c", "messages": [{"role": "user", "content": text}]}
    good = {**row, "messages": [USER]}
    assert dict(read(tmp_path, [row, good]).dropped) == {"placeholder_text": 1}


# OpenTelemetry


def otlp(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        return {"arrayValue": {"values": [otlp(item) for item in value]}}
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}


def span(attributes: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = [{"key": key, "value": otlp(value)} for key, value in attributes.items()]
    return {"traceId": "t", "spanId": "1", "startTimeUnixNano": "1700000000500000000", "attributes": found, **more}


def test_otlp_values_are_typed_and_times_are_nanoseconds_as_text(tmp_path: Path) -> None:
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.stop_sequences": ["a", "b"],
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "hi"}]}]),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "yo"}]}]),
        "gen_ai.conversation.id": "c",
    }
    later = {"startTimeUnixNano": "1700000002000000001", "spanId": "2", "parentSpanId": "1"}
    spans = [
        span(attributes),
        span({**attributes, "gen_ai.operation.name": "execute_tool"}, spanId="3"),
        span(attributes, **later),
        span(attributes, spanId="4", status={"code": 2}),
        span({"http.method": "POST"}, spanId="5"),
    ]
    trace = read(tmp_path, [{"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}])
    assert (trace.format, trace.read, dict(trace.dropped)) == ("otel", 5, {"not_a_generation": 2, "failed_upstream": 1})
    assert trace.arrivals_s.tolist() == [0.0, 1.500000001]
    first, _ = trace.requests()
    assert (first.messages, first.output_text, first.max_tokens) == ([USER], "yo", 50)
    assert (first.sampling, first.input_tokens, first.output_tokens) == ({"stop": ["a", "b"]}, 9, 4)
    assert (trace.values("session_id"), trace.values("parent")) == (["c", "c"], [None, 1])


def test_numbered_messages_of_an_array_of_spans(tmp_path: Path) -> None:
    attributes = {
        "gen_ai.request.model": "m", "gen_ai.prompt.0.role": "system", "gen_ai.prompt.0.content": "be brief",
        "gen_ai.prompt.1.role": "user", "gen_ai.prompt.1.content": "hi", "gen_ai.completion.0.content": "yo",
        "gen_ai.usage.prompt_tokens": 5, "gen_ai.usage.completion_tokens": 2,
    }  # fmt: skip
    spans = [
        {
            "name": "chat",
            "trace_id": 9,
            "span_id": 11028930176666491606,
            "start_time": 1700000000000000000,
            "attributes": attributes,
        },
        {"name": "agent", "trace_id": 9, "span_id": 2, "start_time": 1700000000000000000, "attributes": {"agent.name": "a"}},
    ]
    trace = read(tmp_path, json.dumps(spans))
    (request,) = trace.requests()
    assert (trace.format, dict(trace.dropped)) == ("otel", {"not_a_generation": 1})
    assert request.messages == [{"role": "system", "content": "be brief"}, USER]
    assert (request.output_text, request.input_tokens, request.output_tokens, request.session_id) == ("yo", 5, 2, "9")


# Mooncake, extended


def test_extended_mooncake_rows_carry_text_messages_or_a_payload_and_delays(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "text_input": "Once", "output_length": 5, "session_id": "a"},
        {"delay": 2000, "messages": [USER], "output_length": 6, "session_id": "a", "tools": [{"type": "function"}],
         "extra": {"temperature": 0.25, "nvext": {"priority": 9}}},
        {"timestamp": 1000, "payload": {"messages": [USER], "max_completion_tokens": 7, "seed": 3}, "session_id": "b"},
        {"timestamp": 500, "input_length": 655, "output_length": 52, "hash_ids": [2**32 + 1, 1]},
        {"timestamp": 600, "output_length": 5, "session_id": "c"},
    ]  # fmt: skip
    trace = read(tmp_path, rows)
    assert (trace.format, dict(trace.dropped)) == ("mooncake", {"no_prompt": 1})
    assert trace.values("line") == [1, 4, 3, 2]
    assert trace.arrivals_s.tolist() == [0.0, 0.5, 1.0, 2.0]
    once, blocks, payload, messages = trace.requests()
    assert (once.prompt, payload.messages, payload.max_tokens, payload.sampling) == ("Once", [USER], 7, {"seed": 3})
    assert (messages.tools, messages.sampling, messages.session_id) == ([{"type": "function"}], {"temperature": 0.25}, "a")
    assert trace.values("prefix_blocks")[1] == [2**32 + 1, 1]
    assert blocks.input_tokens == 655


def test_turns_that_lack_the_reply_before_them_are_dropped(tmp_path: Path) -> None:
    turn = {"session_id": "s", "message_mode": "delta", "messages": [USER], "output_length": 5}
    trace = read(tmp_path, [{**turn, "timestamp": 0}, {**turn, "delay": 10}, {**turn, "timestamp": 1, "session_id": "r"}])
    assert (trace.kept, dict(trace.dropped)) == (2, {"turn_needs_a_live_reply": 1})


def test_mooncake_in_seconds_and_with_other_blocks_is_noticed(tmp_path: Path) -> None:
    rows = [{"timestamp": i * 0.2, "input_length": 33, "output_length": 1, "hash_ids": [1, 2, 3]} for i in range(3)]
    trace = read(tmp_path, rows)
    assert trace.arrivals_s.tolist() == pytest.approx([0, 0.2, 0.4])
    assert trace.values("block_size") == [16, 16, 16]
    assert any("16 tokens" in note for note in trace.notes)


# Server logs


def test_sglang_events_are_joined_wherever_they_stand_in_the_log(tmp_path: Path) -> None:
    asked = {"text": "Hi", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    meta = {"finish_reason": {"type": "stop"}, "prompt_tokens": 1, "completion_tokens": 5, "e2e_latency": 0.9}
    lines = [
        "[2025-10-02 23:42:01] server_args=ServerArgs(model_path='m')",
        json.dumps({"timestamp": "2025-10-02T23:42:15.100000", "event": "request.received", "rid": "r1", "obj": asked}),
        "[2025-10-02 23:42:15] Prefill batch. #new-seq: 1",
        "(worker pid=1) "
        + json.dumps({"timestamp": "2025-10-02T23:42:16", "event": "request.finished", "rid": "r1",
                      "out": {"text": "Hello", "meta_info": meta}}),
        json.dumps({"timestamp": "2025-10-02T23:42:18.5", "event": "request.finished", "rid": "r2", "obj": {},
                    "out": {"meta_info": meta}}),
    ]  # fmt: skip
    trace = read(tmp_path, "\n".join(lines) + "\n")
    assert (trace.format, trace.read, trace.kept) == ("sglang_log", 2, 2)
    first, second = trace.requests()
    assert (first.prompt, first.output_text, first.max_tokens, first.output_tokens) == ("Hi", "Hello", 8, 5)
    assert (second.prompt, second.arrival_s) == (None, pytest.approx(2.5))  # its end less its latency: 17.6 s


def test_a_text_that_the_sglang_log_cut_is_not_taken(tmp_path: Path) -> None:
    row = {"timestamp": "2025-10-02T23:42:15", "event": "request.received", "rid": "r", "obj": {"text": "x" * 2048}}
    assert read(tmp_path, [row]).values("prompt") == [None]


@pytest.mark.parametrize(
    ("line", "sampling", "limit"),
    [
        ("INFO 02-20 21:36:30 async_llm_engine.py:433] Received request cmpl-0: prompt: None, prefix_pos: None,sampling_params: "
         "SamplingParams(n=1, best_of=4, presence_penalty=0.0, temperature=0.5, top_k=-1, max_tokens=16), prompt_token_ids: [1]",
         {"best_of": 4, "temperature": 0.5}, 16),
        ("vllm-server | INFO 04-02 12:30:23 logger.py:39] Received request cmpl-a-0: prompt: 'SamplingParams(temperature=9.0)', "
         "params: SamplingParams(n=1, min_p=0.0, seed=None, stop=[], max_tokens=None, min_tokens=0, temperature=0.0), lora: None",
         {"temperature": 0.0}, None),
    ],
)  # fmt: skip
def test_vllm_log_lines_of_several_versions(tmp_path: Path, line: str, sampling: dict[str, Any], limit: int | None) -> None:
    trace = read(tmp_path, f"INFO:     Application startup complete.\n{line}\n")
    (request,) = trace.requests()
    assert (trace.format, request.sampling, request.max_tokens) == ("vllm_log", sampling, limit)


def test_a_vllm_log_goes_on_after_new_year(tmp_path: Path) -> None:
    line = "INFO {} logger.py:39] Received request a: params: SamplingParams(temperature=1.0), lora_request: None."
    trace = read(tmp_path, "\n".join(line.format(at) for at in ("12-31 23:59:58", "01-01 00:00:01")))
    assert trace.arrivals_s.tolist() == [0.0, 3.0]


# Agents


def test_each_assistant_message_of_a_trajectory_is_a_request_in_one_session(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    history = [USER, call, {"role": "tool", "content": "out", "tool_call_id": "1"}, {"role": "assistant", "content": "done"}]
    rows = [
        {"instance_id": "a", "messages": history},
        {"instance_id": "b", "history": [USER, {"role": "assistant", "content": "x"}]},
    ]
    trace = read(tmp_path, rows)
    assert (trace.format, trace.values("session_id"), trace.values("parent")) == (
        "trajectory",
        ["1", "1", "2"],
        [None, 2, None],
    )
    assert [len(messages) for messages in trace.values("messages")] == [1, 3, 1]
    assert trace.values("messages")[1] == history[:3]
    assert trace.values("output_text") == [None, "done", "x"]


# Lengths only


def test_burstgpt_sessions_are_uuids_and_api_rows_have_none(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "19440110.0,1722ac82-0a46-4bf0-aa08-89794e7a2b3f,43,GPT-4,906,446,1352,Conversation log\n"
        "19440161.0,,2,ChatGPT,36,0,36,API log\n19440192.0,,2,ChatGPT,36,29,65,API log\n",
    )
    assert (trace.arrivals_s.tolist(), dict(trace.dropped)) == ([0.0, 82.0], {"failed_upstream": 1})
    assert trace.values("session_id") == ["1722ac82-0a46-4bf0-aa08-89794e7a2b3f", None]
    assert trace.values("category") == ["Conversation log", "API log"]


def test_bailian_rows_may_lack_blocks(tmp_path: Path) -> None:
    rows = [{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 521, "output_length": 132, "type": "text",
             "turn": 1},
            {"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.5, "input_length": 400, "output_length": 80, "type": "file",
             "turn": 2}]  # fmt: skip
    trace = read(tmp_path, rows)
    assert (trace.format, trace.arrivals_s.tolist()) == ("bailian", pytest.approx([0.0, 1.386]))
    assert (trace.values("session_id"), trace.values("category")) == (["159", "159"], ["text", "file"])


def test_litellm_spend_logs_give_times_as_text(tmp_path: Path) -> None:
    row = {"request_id": "r", "call_type": "acompletion", "startTime": "2024-05-29 13:46:19.963000", "endTime": None,
           "prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11, "messages": [USER], "cache_hit": "None",
           "response": {"choices": [{"message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}]}}  # fmt: skip
    later = {**row, "startTime": "2024-05-29T13:46:20.463Z", "response": {}}
    trace = read(tmp_path, [row, later])
    assert (trace.format, trace.arrivals_s.tolist()) == ("litellm", [0.0, 0.5])
    assert trace.values("output_text") == ["a", None]
