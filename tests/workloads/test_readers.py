"""Every reader: known answers on slices of real files, and that no bytes give a traceback or a lost row."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workloads.formats import FORMATS
from workloads.load import load_trace
from workloads.types import Trace, WorkloadError

DATA = Path(__file__).parent.parent / "data" / "traces"

REAL = [
    ("azure2023_code.csv.gz", "azure", 8819, 8819, {}),
    ("azure2023_conv.csv.gz", "azure", 19366, 19366, {}),
    ("BurstGPT_1.head400.csv", "burstgpt", 400, 383, {"failed_upstream": 17}),
    ("mooncake_conversation.head3000.jsonl.gz", "mooncake", 3000, 3000, {}),
    ("mooncake_toolagent.head74.jsonl", "mooncake", 74, 74, {}),
    ("mt_bench.head5.jsonl", "prompt_set", 5, 5, {}),
    ("human_eval.head4.jsonl", "prompt_set", 4, 4, {}),
    ("gsm8k.head4.jsonl", "prompt_set", 4, 4, {}),
    ("sharegpt_40.json", "sharegpt", 40, 40, {}),
    ("otel_simple_chain.json", "otel", 3, 3, {}),
    ("local.traj.json", "trajectory", 2, 2, {}),
    ("openai_batch.jsonl", "openai_batch", 5, 3, {"embeddings_url": 1, "empty_messages": 1}),
    ("sglang_request_log.jsonl", "sglang_log", 2, 1, {"failed_upstream": 1}),
    ("vllm_request_log.txt", "vllm_log", 2, 2, {}),
]


def read(tmp_path: Path, content: bytes | str, **options: object) -> Trace:
    path = tmp_path / "trace"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return load_trace(path, **options)  # type: ignore[arg-type]


def outcome(tmp_path: Path, content: bytes | str, format: str) -> Trace | str:
    """The trace, or the message of the error."""
    try:
        return read(tmp_path, content, format=format)
    except WorkloadError as error:
        return str(error)


def assert_accounted_or_one_line(found: Trace | str) -> None:
    if isinstance(found, str):
        assert found.startswith("trace")
        assert "\n" not in found
    else:
        assert found.read == found.kept + sum(found.dropped.values())
        assert len(found.requests()) == found.kept


@pytest.mark.parametrize(("name", "format", "rows", "kept", "dropped"), REAL)
def test_real_files_are_recognised_and_every_row_is_accounted_for(
    name: str, format: str, rows: int, kept: int, dropped: dict[str, int]
) -> None:
    trace = load_trace(DATA / name)
    assert (trace.format, trace.read, trace.kept, dict(trace.dropped)) == (format, rows, kept, dropped)


def test_azure_starts_at_zero_and_keeps_the_last_row_that_has_no_line_end() -> None:
    trace = load_trace(DATA / "azure2023_conv.csv.gz")
    assert trace.arrivals_s[0] == 0.0
    assert trace.values("line")[-1] == 19367
    assert trace.values("input_tokens")[:2] == [374, 396]
    assert trace.arrivals_s[1] == pytest.approx(4.314579, abs=1e-9)


def test_mooncake_blocks_cover_every_input() -> None:
    trace = load_trace(DATA / "mooncake_conversation.head3000.jsonl.gz")
    blocks = [len(b) for b in trace.values("prefix_blocks")]
    assert np.array_equal(np.ceil(trace.numbers("input_tokens") / 512), blocks)
    assert trace.arrivals_s.max() == 987.0  # milliseconds in the file


def test_azure_2024_times_with_and_without_fraction_and_the_image_column(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:05+00:00,2,100,7\n2024-05-10 00:00:00.009930+00:00,0,2162,5\n"
    )
    trace = read(tmp_path, text)
    assert trace.arrivals_s.tolist() == [0.0, 4.99007]
    assert trace.values("images") == [0, 2]
    assert any("1 rows came before" in note for note in trace.notes)


def test_burstgpt_3_is_read_by_column_name(tmp_path: Path) -> None:
    text = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "19440110.0,,3.5,GPT-4,10,20,30,API log\n19440112.5,7,1.0,ChatGPT,11,21,32,Conversation log\n"
    )
    trace = read(tmp_path, text)
    assert trace.values("input_tokens") == [10, 11]
    assert trace.values("session_id") == [None, "7"]
    assert trace.arrivals_s.tolist() == [0.0, 2.5]


def test_csv_rows_without_a_usable_number_are_dropped_by_reason_and_lines_keep_their_numbers(tmp_path: Path) -> None:
    rows = ["2023-11-16 18:15:46,10,5", "", "2023-11-16 18:15:47,-1,5", "2023-11-16 18:15:48,nan,5", "2023-11-16 18:15:49,3,0"]
    rows += ["garbage,3,3", "1,2", "2023-11-16 18:15:50,7,9"]
    trace = read(tmp_path, "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\r\n" + "\r\n".join(rows))
    assert trace.values("line") == [2, 9]
    assert trace.dropped == {"bad_input_tokens": 2, "failed_upstream": 1, "bad_time": 1, "wrong_number_of_fields": 1}
    assert trace.read == 7


def test_a_block_id_beyond_32_bits_stays_itself(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [2**32 + 1, 2**64 - 1]}
    assert read(tmp_path, json.dumps(row) + "\n").values("prefix_blocks") == [[4294967297, 18446744073709551615]]


def test_bailian_joins_turns_and_ragpulse_keeps_the_order_of_its_parts(tmp_path: Path) -> None:
    turns = [
        {"chat_id": 5, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 20, "output_length": 3, "type": "text",
         "turn": 1, "hash_ids": [1, 2]},
        {"chat_id": 6, "parent_chat_id": 5, "timestamp": 2.5, "input_length": 33, "output_length": 3, "type": "text",
         "turn": 2, "hash_ids": [1, 2, 3]},
    ]  # fmt: skip
    trace = read(tmp_path, "".join(json.dumps(turn) + "\n" for turn in turns))
    assert (trace.format, trace.values("session_id"), trace.values("parent")) == ("bailian", ["5", "5"], [None, 1])
    parts = {"user_input": [9], "sys_prompt": [1], "passages_ids": [4, 3], "history": [], "web_search": []}
    row = {"timestamp": "82", "input_length": 30, "output_length": 2, "hash_ids": parts, "session_id": "s"}
    trace = read(tmp_path, json.dumps(row) + "\n\n")
    assert (trace.format, trace.values("prefix_blocks")) == ("ragpulse", [[1, 4, 3, 9]])


def test_batch_results_are_joined_by_id_and_a_repeated_id_joins_nothing(tmp_path: Path) -> None:
    def ask(name: str) -> dict[str, object]:
        return {"custom_id": name, "url": "/v1/completions", "body": {"prompt": "p", "max_tokens": 4, "temperature": 0}}

    answer = {"choices": [{"text": "done", "finish_reason": "stop"}], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
    result = {"response": {"status_code": 200, "body": answer}, "error": None}
    rows = [ask("a"), ask("b"), ask("b"), {"custom_id": "a", **result}, {"custom_id": "b", **result}]
    trace = read(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    assert trace.values("output_text") == ["done", None, None]
    assert trace.read == trace.kept == 3


def test_litellm_counts_failures_and_cache_hits_apart(tmp_path: Path) -> None:
    good = {"call_type": "acompletion", "startTime": 1700000000.5, "endTime": 1700000001.5, "status": "success",
            "prompt_tokens": 5, "completion_tokens": 6, "messages": [{"role": "user", "content": "hi"}],
            "model_parameters": {"temperature": 0.2}}  # fmt: skip
    rows = [good, {**good, "status": "failure"}, {**good, "cache_hit": True}, {**good, "messages": "redacted-by-litellm"}]
    trace = read(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    assert (trace.format, dict(trace.dropped)) == ("litellm", {"failed_upstream": 1, "cache_hit": 1})
    assert [bool(m) for m in trace.values("messages")] == [True, False]


def test_native_rows_survive_crlf_bom_blank_lines_and_a_cut_last_line(tmp_path: Path) -> None:
    row = '{"arrival_s": 0, "prompt": "a\u2028b", "id": 1}'
    trace = read(tmp_path, f"\ufeff{row}\r\n\r\n{row}\r\n" + '{"arrival_s": 1, "pro')
    assert trace.values("prompt") == ["a\u2028b", "a\u2028b"]
    assert trace.dropped == {"truncated_last_line": 1}
    assert trace.values("line") == [1, 3]


def test_nan_negative_and_zero_counts_are_dropped_by_reason(tmp_path: Path) -> None:
    rows = ['{"prompt":"x","output_tokens":NaN}', '{"prompt":"x","output_tokens":-1}', '{"prompt":"x","output_tokens":0}']
    trace = read(tmp_path, "\n".join([*rows, '{"prompt":"x","output_tokens":3}', ""]))
    assert (trace.kept, dict(trace.dropped)) == (1, {"bad_output_tokens": 2, "failed_upstream": 1})


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_compressed_files_read_as_the_plain_one(tmp_path: Path, compress: object) -> None:
    plain = (DATA / "BurstGPT_1.head400.csv").read_bytes()
    assert read(tmp_path, compress(plain)).table == load_trace(DATA / "BurstGPT_1.head400.csv").table  # type: ignore[operator]


def test_a_broken_line_is_named_and_a_pickle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"trace:2: is not JSON"):
        read(tmp_path, '{"prompt": "x"}\n{"prompt": \n{"prompt": "y"}\n')
    with pytest.raises(WorkloadError, match="pickle"):
        read(tmp_path, b"\x80\x04K\x01.")
    with pytest.raises(WorkloadError, match="empty"):
        read(tmp_path, "\n \n")


def test_a_window_and_a_limit_count_what_they_leave_out(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"arrival_s": t, "prompt": "x"}) + "\n" for t in (5.0, 0.0, 1.0, 2.0, 3.0))
    window = read(tmp_path, rows, window=(1, 3))
    assert (window.arrivals_s.tolist(), dict(window.dropped)) == ([0.0, 1.0], {"outside_window": 3})
    limited = read(tmp_path, rows, limit=2)
    assert (limited.values("line"), limited.read, limited.kept) == ([2, 1], 5, 2)


SEEDS = [
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n",
    b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n",
    b'{"timestamp": 0, "input_length": 6, "output_length": 5, "hash_ids": [1]}\n',
    b'{"prompt": "x", "timestamp": 1}\n',
    (DATA / "vllm_request_log.txt").read_bytes(),
    (DATA / "sglang_request_log.jsonl").read_bytes(),
    (DATA / "openai_batch.jsonl").read_bytes(),
]


@pytest.mark.parametrize("format", FORMATS)
@given(
    content=st.one_of(st.binary(max_size=200), st.builds(lambda a, b: a + b, st.sampled_from(SEEDS), st.binary(max_size=60)))
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_give_accounted_rows_or_one_clear_line(tmp_path: Path, format: str, content: bytes) -> None:
    assert_accounted_or_one_line(outcome(tmp_path, content, format))


scalars = st.one_of(st.none(), st.booleans(), st.integers(-3, 2**70), st.floats(), st.text(max_size=5))
names = st.sampled_from(
    ["prompt", "messages", "timestamp", "input_length", "output_length", "hash_ids", "body", "custom_id", "conversations", "turns",
     "startTime", "call_type", "type", "attributes", "spanId", "chat_id", "parent_chat_id", "delay", "event", "rid", "response"]
)  # fmt: skip
objects = st.dictionaries(
    names, st.recursive(scalars, lambda s: st.lists(s, max_size=3) | st.dictionaries(names, s, max_size=3))
)


@pytest.mark.parametrize("format", FORMATS)
@given(rows=st.lists(objects, min_size=1, max_size=3))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_json_objects_give_accounted_rows_or_one_clear_line(tmp_path: Path, format: str, rows: list[object]) -> None:
    assert_accounted_or_one_line(outcome(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), format))


@pytest.mark.parametrize("response", [1, {"body": 1}, {"status_code": 500}])
def test_a_batch_result_without_an_answer_is_a_failed_request(tmp_path: Path, response: object) -> None:
    rows = [{"custom_id": "a", "body": {"prompt": "again"}}, {"custom_id": "a", "response": response}]
    with pytest.raises(WorkloadError, match=r"no usable request \(failed_upstream 1\)"):
        read(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), format="openai_batch")
