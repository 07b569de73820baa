"""Our client and `vllm bench serve` on the same vLLM server with the same requests, in turn: do both read the same TPOT?

    python -m benchmarks.vllm_bench --engine VLLM_PYTHON [--variant ngram --k 4] [--rounds 3]

vLLM's own tool needs `pandas` and `datasets` in its environment. Prompts are sent as they stand to /v1/completions, greedily, each with an
output length of its own, one every 1 / RATE_RPS seconds: at equal times the same requests overlap, which a fixed number in flight does
not ensure (requests that begin together end together in vLLM's tool, and ours starts them apart). The table gives the median TPOT that
each reads in each round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import uvloop

from backends import vllm
from backends.process import Server, free_port
from backends.reference.demo_model import demo_model_dir
from backends.types import Endpoint, ServingConfig
from harness.client import ReplayOptions
from harness.replay import replay
from harness.types import Load
from harness.warmup import warm_up
from workloads.load import DEMO_TRACE, load_trace
from workloads.types import Request

REQUESTS, RATE_RPS = 48, 2.5
OUTPUT_TOKENS = [24 + 7 * i % 48 for i in range(REQUESTS)]  # 24 to 71, every one once
BENCH = "import argparse, vllm.benchmarks.serve as s; p = argparse.ArgumentParser(); s.add_cli_args(p); s.main(p.parse_args())"


def prompts() -> list[str]:
    """The bundled sample's conversations as plain text."""
    requests = sorted(load_trace(DEMO_TRACE).requests(), key=lambda r: len(str(r.messages)))[:REQUESTS]
    return ["\n".join(str(message["content"]) for message in request.messages or []) for request in requests]


def ours(endpoint: Endpoint, texts: list[str]) -> float:
    """Median TPOT in seconds."""
    sampling = {"temperature": 0, "ignore_eos": True}
    requests = [
        Request(i, i / RATE_RPS, prompt=text, max_tokens=tokens, sampling=sampling)
        for i, (text, tokens) in enumerate(zip(texts, OUTPUT_TOKENS, strict=True))
    ]
    run = uvloop.run(replay(endpoint, requests, Load("trace", "sample"), ReplayOptions()))
    return statistics.median(record.tpot_s for record in run.records if record.tpot_s is not None)


def theirs(python: str, endpoint: Endpoint, model: Path, texts: list[str], folder: Path) -> float:
    """Median TPOT in seconds."""
    data = folder / "prompts.jsonl"
    rows = [{"prompt": text, "output_tokens": tokens} for text, tokens in zip(texts, OUTPUT_TOKENS, strict=True)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [
        "--backend",
        "openai",
        "--base-url",
        endpoint.base_url,
        "--endpoint",
        "/v1/completions",
        "--model",
        endpoint.model,
    ]
    options += ["--tokenizer", str(model), "--dataset-name", "custom", "--dataset-path", str(data), "--skip-chat-template"]
    options += [
        "--custom-output-len",
        "-1",
        "--num-prompts",
        str(len(texts)),
        "--ignore-eos",
        "--temperature",
        "0",
    ]
    options += [
        "--request-rate",
        str(RATE_RPS),
        "--burstiness",
        "1e6",
        "--disable-shuffle",
        "--save-result",
        "--result-dir",
        str(folder),
    ]
    options += ["--result-filename", "bench.json"]
    done = subprocess.run([python, "-c", BENCH, *options], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
    return float(json.loads((folder / "bench.json").read_text())["median_tpot_ms"]) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True, help="Python interpreter of vLLM's environment")
    parser.add_argument("--variant", default="ngram")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    model, texts = demo_model_dir(), prompts()
    base = ("--max-model-len", "2048", "--enforce-eager", "--dtype", "bfloat16")
    extra = {"env": {"VLLM_CPU_KVCACHE_SPACE": "1"}}
    off = ServingConfig(
        "vllm", str(model), max_num_seqs=16, prefix_caching=False, extra=extra
    )  # or the second client finds it warm
    on = ServingConfig.from_dict({**off.to_dict(), "variant": given.variant, "k": given.k})
    print("| setting | round | ours, ms | vllm bench serve, ms | ours ÷ theirs |\n|---|---|---|---|---|")
    for config in (off, on):
        port = free_port()
        launch = vllm.launch(config, port=port, command=(given.engine,), base_args=base)
        with (
            tempfile.TemporaryDirectory() as name,
            Server.start(launch, port=port, folder=Path(name), backend="vllm") as server,
        ):
            endpoint = server.endpoint
            warm = [Request(i, None, prompt=text, max_tokens=8) for i, text in enumerate(texts)]
            uvloop.run(warm_up(endpoint, warm, Load("closed", "sample", concurrency=4), ReplayOptions()))
            for number in range(given.rounds):
                clients = [partial(ours, endpoint, texts), partial(theirs, given.engine, endpoint, model, texts, Path(name))]
                turn = -1 if number % 2 else 1  # they take turns in going first
                mine, other = [client() for client in clients[::turn]][::turn]
                row = f"{mine * 1e3:.2f} | {other * 1e3:.2f} | {mine / other:.3f}"
                print(f"| {config.label()} | {number + 1} | {row} |", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
