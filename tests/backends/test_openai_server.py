"""The HTTP server shared by the in-repo engines, driven by an engine whose every chunk is scripted."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
import uvicorn

from backends.openai_server import create_app, listen
from backends.serving import GenerationRequest, RequestError, TokenChunk, TokenLogprob

SCRIPT = (TokenChunk((11,), "one"), TokenChunk((12, 13, 14), " two three four"), TokenChunk((15,), " five", "length"))


def with_logprobs(chunk: TokenChunk, count: int) -> TokenChunk:
    """Every token at -0.5, the runner-up, which reads the same, at -1.5."""
    told = [TokenLogprob(-0.5, ((token, -0.5), (token + 100, -1.5))[:count]) for token in chunk.token_ids]
    return replace(chunk, logprobs=tuple(told))


class ScriptedEngine:
    """Emits `SCRIPT`. The first token of the prompt asks for more: 1 fails mid-stream, 2 fails at once, 3 refuses, 4 hangs
    after a chunk, 5 takes 0.3 s between chunks."""

    model = "scripted"
    max_model_len = 100
    max_logprobs = 2

    def __init__(self) -> None:
        self.ready = True
        self.seen: list[GenerationRequest] = []
        self.cancelled = threading.Event()
        self.drained = False

    def encode(self, text: str) -> list[int]:
        return [100 + len(word) for word in text.split()]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[int]:
        return [7] * len(tools or ()) + self.encode(" ".join(message["content"] for message in messages))

    def decode(self, token_ids: Sequence[int]) -> str:
        return f"<{token_ids[0] % 100}>"

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        self.seen.append(request)
        first = request.prompt_ids[0]
        if first == 2:
            raise RuntimeError("engine dead")
        if first == 3:
            raise RequestError("seed must be under 10", field="seed")
        try:
            for chunk in SCRIPT:
                yield chunk if request.logprobs is None else with_logprobs(chunk, request.logprobs)
                if first == 1:
                    raise RuntimeError("engine dead")
                if first == 4:
                    await asyncio.sleep(60)
                if first == 5:
                    await asyncio.sleep(0.3)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    def metrics_page(self) -> str:
        return "spectune:decode_steps_total 3\n"

    async def drain(self) -> None:
        self.drained = True


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def client(engine: ScriptedEngine) -> Iterator[httpx.Client]:
    sock = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app(engine), log_level="critical", http="httptools", loop="asyncio"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    with httpx.Client(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=10) as http:
        yield http
    server.should_exit = True
    thread.join(10)
    assert engine.drained


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_completion_stream_has_one_chunk_per_step_with_token_ids_and_usage(client: httpx.Client) -> None:
    body = {"model": "scripted", "prompt": "a bb", "stream": True, "return_token_ids": True, "max_tokens": 9}
    got = events(client.post("/v1/completions", json={**body, "stream_options": {"include_usage": True}}))
    assert [event["choices"][0]["text"] for event in got[:3]] == ["one", " two three four", " five"]
    assert [event["choices"][0]["token_ids"] for event in got[:3]] == [[11], [12, 13, 14], [15]]
    assert [event["choices"][0]["finish_reason"] for event in got[:3]] == [None, None, "length"]
    assert got[0]["choices"][0]["prompt_token_ids"] == [101, 102]
    assert "prompt_token_ids" not in got[1]["choices"][0]
    assert all("usage" not in event for event in got[:3])
    assert got[3]["choices"] == []
    assert got[3]["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
    assert got[4:] == ["[DONE]"]


def test_chat_stream_opens_with_the_role_and_counts_usage_on_every_chunk(client: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "scripted", "messages": [{"role": "user", "content": [{"type": "text", "text": "a b c"}]}]}
    got = events(client.post("/v1/chat/completions", json={**body, "stream": True, "stream_options": options}))
    assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "token_ids" not in got[1]["choices"][0]
    assert [event["usage"]["completion_tokens"] for event in got[1:5]] == [1, 4, 5, 5]
    assert got[5] == "[DONE]"


def test_whole_answers(client: httpx.Client, engine: ScriptedEngine) -> None:
    body: dict[str, Any] = {"model": "scripted", "return_token_ids": True}
    completion = client.post("/v1/completions", json={**body, "prompt": [5, 6]}).json()
    assert completion["choices"][0]["text"] == "one two three four five"
    assert completion["choices"][0]["token_ids"] == [11, 12, 13, 14, 15]
    assert completion["usage"]["prompt_tokens"] == 2
    chat = {
        **body,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function"}],
        "max_completion_tokens": 4,
    }
    answer = client.post("/v1/chat/completions", json=chat).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "one two three four five"}
    assert answer["prompt_token_ids"] == [7, 102]
    assert [request.max_tokens for request in engine.seen] == [16, 4]


def test_parameters_reach_the_engine(client: httpx.Client, engine: ScriptedEngine) -> None:
    body = {"model": "scripted", "prompt": ["a"], "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "seed": 4}
    extra = {"stop": "x", "ignore_eos": True, "metadata": {"category": "code"}, "user": "someone", "n": 1}
    assert client.post("/v1/completions", json={**body, **extra}, headers={"x-request-id": "r7"}).status_code == 200
    assert engine.seen == [GenerationRequest((101,), 3, 0.5, 0.9, 0, 4, ("x",), True, None, "r7", "code")]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 2}, "n"),
        ({"logprobs": 5}, "logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_token": 5}, "max_token"),
        ({"stream_options": {"include_usages": True}}, "stream_options"),
        ({"stop": [""]}, "stop"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [5] * 100}, "prompt"),
        ({"prompt": [3]}, "seed"),
        ({"model": "other"}, "model"),
    ],
)
def test_wrong_completion_is_refused_by_field(client: httpx.Client, change: dict[str, Any], field: str) -> None:
    response = client.post("/v1/completions", json={"model": "scripted", "prompt": "a", "stream": True, **change})
    assert response.status_code == (404 if field == "model" else 400)
    error = response.json()["error"]
    assert error["param"] == field
    assert field in error["message"]
    assert error["code"] == response.status_code


@pytest.mark.parametrize(
    ("messages", "field"),
    [([], "messages"), ([{"content": "x"}], "messages"), ([{"role": "user", "content": [{"type": "image_url"}]}], "messages")],
)
def test_wrong_messages_are_refused(client: httpx.Client, messages: Any, field: str) -> None:
    response = client.post("/v1/chat/completions", json={"model": "scripted", "messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


def test_body_that_is_not_json_is_refused(client: httpx.Client) -> None:
    response = client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "not JSON" in response.json()["error"]["message"]


def test_failure_before_the_first_token_is_a_500_and_after_it_an_error_event(client: httpx.Client) -> None:
    early = client.post("/v1/completions", json={"model": "scripted", "prompt": [2], "stream": True})
    assert (early.status_code, early.json()["error"]["message"]) == (500, "engine dead")
    late = client.post("/v1/completions", json={"model": "scripted", "prompt": [1], "stream": True})
    got = events(late)
    assert late.status_code == 200
    assert got[0]["choices"][0]["text"] == "one"
    assert got[1] == {"error": {"message": "engine dead", "type": "InternalServerError", "param": None, "code": 500}}
    assert got[2] == "[DONE]"
    assert client.post("/v1/completions", json={"model": "scripted", "prompt": [1]}).status_code == 500


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_cancels_the_request(client: httpx.Client, engine: ScriptedEngine, stream: bool) -> None:
    body = {"model": "scripted", "prompt": [4], "stream": stream}
    if stream:
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert next(response.iter_lines()).startswith("data: ")
    else:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=body, timeout=0.3)
    assert engine.cancelled.wait(5)


def test_pages_beside_generation(client: httpx.Client, engine: ScriptedEngine) -> None:
    assert client.get("/v1/models").json()["data"][0]["id"] == "scripted"
    assert client.post("/tokenize", json={"prompt": "a bb"}).json() == {"count": 2, "max_model_len": 100, "tokens": [101, 102]}
    assert client.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]}).json()["tokens"] == [101]
    assert client.post("/tokenize", json={}).status_code == 400
    assert client.get("/metrics").text == "spectune:decode_steps_total 3\n"
    assert "version" in client.get("/version").json()
    assert client.get("/health").status_code == 200
    engine.ready = False
    assert client.get("/health").status_code == 503
    assert client.post("/v1/completions", json={"model": "scripted", "prompt": "a"}).status_code == 503


SERVER = """
import sys
from backends.openai_server import run
from tests.backends.test_openai_server import ScriptedEngine
run(ScriptedEngine(), port=int(sys.argv[1]))
"""


def free_port() -> int:
    with listen("127.0.0.1", 0) as sock:
        return int(sock.getsockname()[1])


def test_sigterm_finishes_what_runs_and_exits_0() -> None:
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", SERVER, str(port)], env={**os.environ, "PYTHONPATH": "."}) as server:
        url = f"http://127.0.0.1:{port}"
        for _ in range(200):
            try:
                httpx.get(f"{url}/health")
                break
            except httpx.TransportError:
                time.sleep(0.05)
        with httpx.stream(
            "POST", f"{url}/v1/completions", json={"model": "scripted", "prompt": "a", "stream": True}
        ) as response:
            lines = response.iter_lines()
            assert "one" in next(lines)
            server.send_signal(signal.SIGTERM)
            assert list(lines)[-2] == "data: [DONE]"
        assert server.wait(10) == 0


def test_port_in_use_is_one_line_and_exit_code_2() -> None:
    with listen("127.0.0.1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-c", SERVER, str(port)],
            env={**os.environ, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port"]


def test_log_probabilities_have_the_layout_of_the_endpoint(client: httpx.Client) -> None:
    body = {"model": "scripted", "prompt": "a", "max_tokens": 5, "logprobs": 2}
    told = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert told["tokens"] == ["<11>", "<12>", "<13>", "<14>", "<15>"]
    assert told["token_logprobs"] == [-0.5] * 5
    assert told["top_logprobs"][0] == {"<11>": -0.5, "<11> (111)": -1.5}
    chat = {"model": "scripted", "messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2}
    content = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 5
    assert content[0] == {
        "token": "<11>",
        "logprob": -0.5,
        "top_logprobs": [{"token": "<11>", "logprob": -0.5}, {"token": "<11>", "logprob": -1.5}],
    }
    streamed = client.post("/v1/completions", json={**body, "stream": True}).text
    assert streamed.count('"token_logprobs":[-0.5') == 3  # one for each chunk
    without = client.post("/v1/completions", json={**body, "logprobs": None}).json()
    assert without["choices"][0]["logprobs"] is None
