"""Other engines on the demo model, for the table of `benchmarks.engine_cpu`: output tokens/s while all sequences decode."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import uvloop

from backends import vllm
from backends.process import Server, free_port
from backends.reference.demo_model import demo_gguf, demo_model_dir
from backends.types import ServingConfig
from harness.client import ReplayOptions
from harness.replay import replay
from harness.types import Load
from workloads.types import Request

LLAMA = """
import json, sys, time
from llama_cpp import Llama
path, tokens, text = sys.argv[1], int(sys.argv[2]), sys.argv[3]
model = Llama(path, n_ctx=1024, n_threads=2, n_threads_batch=2, verbose=False)
for line in sys.stdin:
    model.reset()
    model.eval(model.tokenize(text.encode(), special=True))
    begun = None
    for count in range(tokens):
        token = model.sample(temp=0.0)
        begun = begun or time.perf_counter()
        model.eval([token])
    print(json.dumps(tokens / (time.perf_counter() - begun)), flush=True)
"""


class Peer:
    """Called with a concurrency it returns tokens/s; NaN where the engine has no such mode."""

    def __init__(self, speed: Callable[[int], float], stack: contextlib.ExitStack | None = None) -> None:
        self._speed = speed
        self._stack = stack or contextlib.ExitStack()

    def __call__(self, concurrency: int) -> float:
        return self._speed(concurrency)

    def close(self) -> None:
        self._stack.close()


def chosen(texts: Sequence[str], tokens: int, *, transformers: bool, vllm: str | None, llama: str | None) -> dict[str, Peer]:
    """The engines asked for. `vllm` and `llama` are the interpreters of their environments."""
    found = {}
    if transformers:
        found["transformers"] = Peer(_transformers(texts, tokens))
    if vllm:
        found["vllm"] = _vllm(vllm, texts, tokens)
    if llama:
        found["llama.cpp Q4_1"] = _llama(llama, texts, tokens)
    return found


def _transformers(texts: Sequence[str], tokens: int) -> Callable[[int], float]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(demo_model_dir(), padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(demo_model_dir(), dtype=torch.bfloat16)
    tokenizer.pad_token = tokenizer.eos_token

    def speed(concurrency: int) -> float:
        inputs = tokenizer(list(texts[:concurrency]), return_tensors="pt", padding=True, add_special_tokens=False)

        def seconds(count: int) -> float:
            start = time.perf_counter()
            model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False)
            return time.perf_counter() - start

        return concurrency * (tokens - 1) / (seconds(tokens) - seconds(1))

    return speed


def _vllm(python: str, texts: Sequence[str], tokens: int) -> Peer:
    """Its default compile, bfloat16, no prefix cache, over HTTP."""
    stack = contextlib.ExitStack()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    extra = {"env": {"VLLM_CPU_KVCACHE_SPACE": "1"}}
    config = ServingConfig("vllm", str(demo_model_dir()), max_num_seqs=64, prefix_caching=False, extra=extra)
    port = free_port()
    launch = vllm.launch(config, port=port, command=(python,), base_args=("--max-model-len", "1024", "--dtype", "bfloat16"))
    server = stack.enter_context(Server.start(launch, port=port, folder=folder, backend="vllm"))
    sampling = {"temperature": 0, "ignore_eos": True}

    def speed(concurrency: int) -> float:
        requests = [
            Request(i, None, prompt=text, max_tokens=tokens, sampling=sampling) for i, text in enumerate(texts[:concurrency])
        ]
        load = Load("closed", "benchmark", concurrency=concurrency)
        records = uvloop.run(replay(server.endpoint, requests, load, ReplayOptions())).records
        chunks = list(itertools.chain.from_iterable(zip(r.chunk_s, r.chunk_tokens, strict=True) for r in records))
        begun = max(r.chunk_s[0] for r in records)
        return sum(count for at, count in chunks if at > begun) / (max(at for at, _ in chunks) - begun)

    speed(1)
    return Peer(speed, stack)


def _llama(python: str, texts: Sequence[str], tokens: int) -> Peer:
    """The 4-bit file that the demo model is made from, one sequence."""
    stack = contextlib.ExitStack()
    argv = [python, "-c", LLAMA, str(demo_gguf()), str(tokens), texts[0]]
    process = stack.enter_context(
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True)
    )

    def speed(concurrency: int) -> float:
        if concurrency > 1:
            return float("nan")
        assert process.stdin
        assert process.stdout
        print(file=process.stdin, flush=True)
        return float(json.loads(process.stdout.readline()))

    stack.callback(process.terminate)
    return Peer(speed, stack)
