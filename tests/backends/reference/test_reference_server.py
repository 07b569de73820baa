"""The engine as a server: over HTTP, under cancellation, and when it fails."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tiny_models import PROMPTS, Build, request

from backends.counters import parse_metrics
from backends.openai_server import listen
from backends.reference.__main__ import main
from backends.reference.service import Service
from backends.serving import RequestError, TokenChunk


@pytest.fixture(scope="module")
def server(tiny_dir: Path) -> Iterator[str]:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "backends.reference", "--model", str(tiny_dir), "--port", str(port)]
    command += ["--variant", "suffix", "--k", "4", "--max-num-seqs", "4"]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": "."}) as process:
        url = f"http://127.0.0.1:{port}"
        for _ in range(1200):
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_completions_equal_transformers_and_the_page_counts_them(server: str, tiny_dir: Path, greedy: list[list[int]]) -> None:
    before, _ = parse_metrics("reference", httpx.get(f"{server}/metrics").text)
    for prompt, expected in zip(PROMPTS[:4], greedy, strict=False):
        body = {"model": tiny_dir.name, "prompt": prompt, "max_tokens": 24, "temperature": 0, "return_token_ids": True}
        answer = httpx.post(f"{server}/v1/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == len(expected)
        assert answer["choices"][0]["token_ids"] == expected
    after, gauges = parse_metrics("reference", httpx.get(f"{server}/metrics").text)
    spent = after - before
    assert spent.generated_tokens == sum(len(text) for text in greedy[:4])
    assert (spent.first_tokens, spent.prompt_tokens) == (4, sum(map(len, PROMPTS[:4])))
    assert spent.tau is not None
    assert spent.tau > 1
    assert gauges.running == 0


def test_the_prefix_cache_can_be_emptied(server: str, tiny_dir: Path) -> None:
    body = {"model": tiny_dir.name, "prompt": [*range(1, 60)], "max_tokens": 2, "temperature": 0}

    def hits() -> int:
        before, _ = parse_metrics("reference", httpx.get(f"{server}/metrics").text)
        httpx.post(f"{server}/v1/completions", json=body, timeout=60).raise_for_status()
        after, _ = parse_metrics("reference", httpx.get(f"{server}/metrics").text)
        return (after - before).prefix_hit_tokens or 0

    hits()
    assert hits() == 58
    httpx.post(f"{server}/reset_prefix_cache", timeout=60).raise_for_status()
    assert hits() == 0


def test_a_request_that_cannot_be_served_is_a_400(server: str, tiny_dir: Path) -> None:
    answer = httpx.post(f"{server}/v1/completions", json={"model": tiny_dir.name, "prompt": [1] * 600, "max_tokens": 5})
    assert answer.status_code == 400
    assert "the context holds 512" in answer.text


async def _collect(service: Service, prompt: list[int], stop_after: int | None = None) -> list[TokenChunk]:
    chunks: list[TokenChunk] = []
    stream = service.generate(request(prompt, 60, ignore_eos=True))
    async for chunk in stream:
        chunks.append(chunk)
        if len(chunks) == stop_after:
            await stream.aclose()
            break
    return chunks


async def _until(condition: object) -> None:
    for _ in range(600):
        if condition():  # type: ignore[operator]
            return
        await asyncio.sleep(0.02)
    raise AssertionError("never true")


def test_closing_a_stream_frees_its_slot(build: Build) -> None:
    async def scenario() -> None:
        engine = build("ngram", 2, max_num_seqs=1)
        service = Service(engine, "tiny")
        await _until(lambda: service.ready)
        await _collect(service, PROMPTS[0], stop_after=2)
        chunks = await _collect(service, PROMPTS[1])  # needs the only slot
        assert sum(len(chunk.token_ids) for chunk in chunks) == 60
        assert [chunk.finish_reason for chunk in chunks[-2:]] == [None, "length"]
        await service.drain()
        assert not engine.has_work
        with pytest.raises(RequestError, match="shutting down"):
            await _collect(service, PROMPTS[0])

    asyncio.run(scenario())


def test_an_engine_that_fails_ends_its_requests_and_is_not_ready(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        engine = build()
        service = Service(engine, "tiny")
        await _until(lambda: service.ready)

        def broken() -> None:
            raise ValueError("out of luck")

        monkeypatch.setattr(engine, "step", broken)
        with pytest.raises(RuntimeError, match="the engine failed: out of luck"):
            await _collect(service, PROMPTS[0])
        assert not service.ready

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variant", "ngram"], "every other variant K >= 1"),
        (["--variant", "eagle3", "--k", "3"], "variant eagle3 needs --draft"),
        (["--variant", "eagle3", "--k", "3", "--draft", "/nowhere"], "draft directory /nowhere does not exist"),
        (["--variant", "ngram", "--k", "3", "--k-schedule", "[[1,2,"], "argument --k-schedule"),
        (["--variant", "ngram", "--k", "3", "--k-schedule", "[[1,2,9]]"], "K must lie between 0 and the configuration's K = 3"),
        (["--variant", "ngram", "--k", "2", "--forced-acceptance", "0.5,x"], "argument --forced-acceptance"),
        (["--variant", "medusa", "--k", "2", "--topk", "3", "--draft", "d"], "needs num_draft_tokens from 3 to 13"),
        (["--dtype", "int7"], "dtype 'int7'"),
        (["--kv-cache-dtype", "fp7"], "argument --kv-cache-dtype: invalid choice: 'fp7'"),
        (["--flag", "1"], "unrecognized arguments: --flag 1 (see --help)"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, tiny_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--model", str(tiny_dir), "--port", "0", *arguments])
    assert left.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert message in lines[-1]
    assert len(lines) == 1
