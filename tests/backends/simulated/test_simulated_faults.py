"""Every fault of the simulated server, seen from the wire, with the answer that is known."""

from __future__ import annotations

import subprocess
import sys
import time

import httpx
import pytest
from simulated_server import serving

from backends.counters import parse_metrics
from backends.openai_server import listen
from backends.simulated.faults import FAULTS, parse_fault
from backends.simulated.presets import PRESETS
from backends.types import ConfigError

WORLD = PRESETS["small"]()
USAGE = {"prompt_tokens": 7, "completion_tokens": 8, "total_tokens": 15}
WITH_USAGE = {"stream_options": {"include_usage": True}}


def test_sound_stream_has_role_tokens_usage_and_done() -> None:
    with serving(WORLD) as server:
        answer = server.ask(**WITH_USAGE)
        (truth,) = server.truth(1)
    assert answer.choices[0]["delta"] == {"role": "assistant", "content": ""}
    tokens = [len(choice["token_ids"]) for choice in answer.choices[1:]]
    assert tokens == truth["chunk_tokens"]
    assert sum(tokens) == 8
    assert truth["decode_steps"] == len(tokens) - 1
    assert answer.events[-2]["usage"] == USAGE
    assert answer.events[-1] == "[DONE]"
    assert (truth["ended"], truth["finish_reason"], truth["prompt_tokens"]) == ("completed", "length", 7)


def test_slow_first_request() -> None:
    with serving(WORLD, "slow_first=0.3") as server:
        server.ask()
        server.ask()
        first, second = server.truth(2)
    assert first["first_token_s"] - first["received_s"] > 0.3
    assert second["first_token_s"] - second["received_s"] < 0.2


def test_stall_begins_at_its_request() -> None:
    with serving(WORLD, "stall=0.3@2") as server:
        server.ask()
        server.ask()
        first, second = server.truth(2)
    assert first["first_token_s"] - first["received_s"] < 0.2
    assert second["first_token_s"] - second["received_s"] > 0.3


def test_role_comes_long_before_the_first_token() -> None:
    with serving(WORLD, "role_first", "stall=0.3") as server:
        answer = server.ask()
    assert answer.choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert sum("role" in choice["delta"] for choice in answer.choices) == 1
    assert answer.packets[0][0] < 0.2
    assert answer.packets[1][0] > 0.3


def test_reasoning_comes_under_both_names_before_the_answer() -> None:
    with serving(WORLD, "reasoning=2", variant="off", k=0) as server:
        answer = server.ask()
    assert [next(iter(delta)) for delta in answer.deltas] == ["reasoning", "reasoning_content", *["content"] * 6]


def test_output_may_be_a_tool_call_only() -> None:
    with serving(WORLD, "tool_call") as server:
        answer = server.ask()
    assert all(set(delta) == {"tool_calls"} for delta in answer.deltas)
    assert answer.deltas[0]["tool_calls"][0]["function"]["name"] == "answer"
    assert answer.choices[-1]["finish_reason"] == "tool_calls"


def test_first_chunks_come_as_one() -> None:
    with serving(WORLD, "bundled_first=3", variant="off", k=0) as server:
        answer = server.ask()
        (truth,) = server.truth(1)
    assert [len(choice["token_ids"]) for choice in answer.choices[1:]] == [3, 1, 1, 1, 1, 1]
    assert truth["chunk_tokens"] == [3, 1, 1, 1, 1, 1]
    assert len(answer.deltas[0]["content"]) == 12


def test_bundle_longer_than_the_answer_still_arrives() -> None:
    with serving(WORLD, "bundled_first=99", variant="off", k=0) as server:
        answer = server.ask()
    assert [len(choice["token_ids"]) for choice in answer.choices[1:]] == [8]
    assert answer.choices[-1]["finish_reason"] == "length"


def test_usage_missing() -> None:
    with serving(WORLD, "usage_missing") as server:
        answer = server.ask(**WITH_USAGE)
    assert b"usage" not in answer.body
    assert answer.events[-1] == "[DONE]"


def test_usage_on_the_last_choice_only() -> None:
    with serving(WORLD, "usage_last_choice") as server:
        answer = server.ask(**WITH_USAGE)
    usages = [event.get("usage") for event in answer.events if event != "[DONE]"]
    assert usages[-1] == USAGE
    assert not any(usages[:-1])
    assert answer.choices[-1]["finish_reason"] == "length"


def test_usage_on_every_chunk() -> None:
    with serving(WORLD, "usage_every", variant="off", k=0) as server:
        answer = server.ask()
    usages = [event["usage"]["completion_tokens"] for event in answer.events[1:-1]]
    assert usages == [1, 2, 3, 4, 5, 6, 7, 8]


def test_empty_output() -> None:
    with serving(WORLD, "empty_output") as server:
        answer = server.ask(**WITH_USAGE)
        (truth,) = server.truth(1)
    assert answer.deltas == [{"content": ""}]
    assert answer.choices[-1]["finish_reason"] == "stop"
    assert answer.events[-2]["usage"]["completion_tokens"] == 0
    assert (truth["first_token_s"], truth["output_tokens"], truth["ended"]) == (None, 0, "completed")


def test_early_end() -> None:
    with serving(WORLD, "early_eos=0.5") as server:
        answer = server.ask(**WITH_USAGE)
    assert answer.choices[-1]["finish_reason"] == "stop"
    assert answer.events[-2]["usage"]["completion_tokens"] == 4


def test_error_event_inside_http_200() -> None:
    with serving(WORLD, "error_event=2", variant="off", k=0) as server:
        answer = server.ask()
        (truth,) = server.truth(1)
    assert answer.status == 200
    assert b"event: error\n" in answer.body
    assert answer.events[-2]["error"]["message"] == "engine dead"
    assert (truth["ended"], truth["output_tokens"]) == ("error", 2)


def test_every_second_request_is_refused() -> None:
    with serving(WORLD, "http_error=429@2") as server:
        assert [server.ask().status for _ in range(4)] == [200, 429, 200, 429]
        assert sorted(truth["status"] for truth in server.truth(4)) == [200, 200, 429, 429]  # logged as they end


def test_connection_is_cut() -> None:
    with serving(WORLD, "cut=3", variant="off", k=0) as server:
        answer = server.ask()
        (truth,) = server.truth(1)
    assert answer.broken == "RemoteProtocolError"
    assert len(answer.deltas) == 3
    assert (truth["ended"], truth["chunk_tokens"]) == ("cut", [1, 1, 1])


def test_stream_may_end_without_done() -> None:
    with serving(WORLD, "no_done") as server:
        answer = server.ask()
    assert answer.broken is None
    assert answer.choices[-1]["finish_reason"] == "length"
    assert b"[DONE]" not in answer.body


def test_crlf_and_comments() -> None:
    with serving(WORLD, "crlf") as server:
        answer = server.ask()
    assert answer.body.startswith(b": keep-alive\r\n\r\ndata: {")
    assert b"\n" not in answer.body.replace(b"\r\n", b"")
    assert answer.events[-1] == "[DONE]"


def test_characters_are_split_across_packets() -> None:
    with serving(WORLD, "utf8_split", variant="off", k=0) as server:
        answer = server.ask(chat=False)
    with pytest.raises(UnicodeDecodeError):
        answer.packets[0][1].decode()
    text = "".join(choice["text"] for choice in answer.choices)
    assert len(text) == 32
    assert text[0] in "é語"


def test_counters_fall_at_their_request() -> None:
    with serving(WORLD, "counter_reset@3") as server:
        server.ask()
        server.ask()
        before, _ = parse_metrics("simulated", server.http.get("/metrics").text)
        server.ask(max_tokens=2)
        after, _ = parse_metrics("simulated", server.http.get("/metrics").text)
    assert (before.generated_tokens, after.generated_tokens) == (16, 2)
    with pytest.raises(ValueError, match="was reset"):
        _ = after - before


def test_page_without_speculation_series() -> None:
    with serving(WORLD, "no_spec_series", dialect="vllm") as server:
        server.ask()
        counters, _ = parse_metrics("vllm", server.http.get("/metrics").text)
    assert counters.generated_tokens == 8
    assert counters.drafted_steps is None


def test_hang_at_start_answers_and_is_never_ready() -> None:
    with serving(WORLD, "hang_at_start") as server:
        assert server.http.get("/health").status_code == 503
        assert server.ask().status == 503


def test_crash_while_loading_names_the_memory_and_exits_1() -> None:
    command = [sys.executable, "-m", "backends.simulated", "--world", "small", "--port", "1", "--fault", "crash_loading"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "CUDA out of memory" in done.stderr


def test_crash_at_a_request_ends_the_process_in_the_stream() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = str(sock.getsockname()[1])
    command = [sys.executable, "-m", "backends.simulated", "--world", "small", "--port", port, "--fault", "crash@2"]
    body = {"model": "simulated", "prompt": "a", "max_tokens": 8, "stream": True}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        url = f"http://127.0.0.1:{port}"
        for _ in range(400):
            try:
                httpx.get(f"{url}/health")
                break
            except httpx.TransportError:
                time.sleep(0.05)
        assert b"[DONE]" in httpx.post(f"{url}/v1/completions", json=body).content
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{url}/v1/completions", json=body)
        assert server.wait(10) == 1
        assert server.stderr is not None
        assert "CUDA error" in server.stderr.read()


@pytest.mark.parametrize("text", ["nonsense", "stall=x", "stall=1@0", "crlf=2", "stall@x"])
def test_wrong_fault_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--fault"):
        parse_fault(text)


def test_faults_have_defaults() -> None:
    assert parse_fault("cut").value == FAULTS["cut"][0] == 3.0
    assert parse_fault("stall=0.25@7").at == 7
