"""Output tokens/s of the reference engine on the demo model, by weight type and drafter, beside the memory roofline and other engines.

    python -m benchmarks.engine_cpu [--tokens 48] [--concurrency 1,8,32] [--only off,int4] [--draft eagle3=DIR ...]
        [--transformers] [--vllm PYTHON] [--llama PYTHON]

Closed loop over real prompts in one process, no HTTP. Rows are interleaved in `--rounds` rounds, so that drift of the machine
falls on all of them; the median round is printed. `tau` is tokens after each sequence's first ÷ decode steps. The last columns
split the time of a step at the largest concurrency: what the drafter, the target's pass, the choice of tokens and everything else
(scheduling, text, counting) take. `--draft` adds rows for a draft head, as a chain of 4 and, where it has one, a tree.

A second table compares a step of one token a sequence with its own linear layers, timed alone in the same rounds, and with the time
that reading the weights takes at the bandwidth measured in between.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from backends.reference.demo_model import demo_model_dir
from backends.reference.engine import Engine
from backends.reference.options import TREES, EngineOptions
from backends.reference.step_clock import PARTS, Part
from backends.serving import GenerationRequest
from benchmarks import engine_peers

ROWS: dict[str, dict[str, Any]] = {
    "off": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "ngram K=4": {"variant": "ngram", "k": 4},
    "suffix K=4": {"variant": "suffix", "k": 4},
    "self-int4 K=4": {"variant": "draft_model", "k": 4, "draft": "self-int4"},
}
TOPICS = (
    "a lighthouse",
    "binary search",
    "the French Revolution",
    "growing tomatoes",
    "compound interest",
    "a lost dog",
    "DNS",
    "jazz",
)
ASKS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "Write a Python function about {}.",
)


def prompts(engine: Engine, count: int) -> list[list[int]]:
    texts = [ask.format(topic) for topic in TOPICS for ask in ASKS]
    return [engine.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts[:count]]


def head_rows(drafts: list[str]) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for variant, _, folder in (draft.partition("=") for draft in drafts):
        rows[f"{variant} K=4"] = {"variant": variant, "k": 4, "draft": folder}
        if variant in TREES:
            rows[f"{variant} tree"] = {"variant": variant, "k": 4, "draft": folder, "topk": 3, "num_draft_tokens": 8}
    return rows


def measure(engine: Engine, concurrency: int, tokens: int) -> tuple[float, float, dict[Part, float]]:
    """Output tokens/s, tau and seconds by part of `concurrency` requests decoded together, their prompts not counted."""
    for prompt in prompts(engine, concurrency):
        engine.add(GenerationRequest(tuple(prompt), tokens, ignore_eos=True))
    while engine.counters.first_tokens < concurrency:
        engine.step()
    before = engine.counters.generated_tokens, engine.counters.decode_steps
    parts = dict(engine.clock.totals)
    start = time.perf_counter()
    while engine.has_work:
        engine.step()
    seconds = time.perf_counter() - start
    emitted, steps = engine.counters.generated_tokens - before[0], engine.counters.decode_steps - before[1]
    engine.counters.first_tokens = 0
    return emitted / seconds, emitted / steps, {part: spent - parts[part] for part, spent in engine.clock.totals.items()}


def linears(engine: Engine, rows: int) -> Callable[[], None]:
    """Every linear layer of the target once, for `rows` tokens, with nothing in between."""
    model = engine.model
    layers = [part for layer in model._layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)] + [model._head]
    config = model.config
    wide = config.num_heads * config.head_dim
    sizes = [config.hidden_size, wide, config.hidden_size, config.intermediate_size] * config.num_layers + [config.hidden_size]
    inputs = {size: torch.randn(rows, size).to(model.dtype) for size in set(sizes)}

    def run() -> None:
        with torch.inference_mode():
            for layer, size in zip(layers, sizes, strict=True):
                layer(inputs[size])

    return run


def seconds_of(run: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def weight_bytes(engine: Engine) -> int:
    """What a step of one token reads: every weight but the embedding table."""
    config = engine.model.config
    wide = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = config.hidden_size * (wide + config.num_heads * config.head_dim + 3 * config.intermediate_size)
    head = config.hidden_size * config.vocab_size
    bits = {"none": (16, 16), "int8": (8, 8), "int4": (4.5, 8)}[
        engine.options.quantization
    ]  # a scale and a zero for 64 weights
    return int((layer * config.num_layers * bits[0] + head * bits[1]) / 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="names of rows, or how they start")
    parser.add_argument("--draft", action="append", default=[], metavar="VARIANT=DIR")
    parser.add_argument("--transformers", action="store_true", help="add a row for transformers.generate")
    parser.add_argument("--vllm", metavar="PYTHON", help="add a row for vLLM from this environment")
    parser.add_argument(
        "--llama", metavar="PYTHON", help="add a row for llama.cpp, 4-bit, from an environment with llama-cpp-python"
    )
    args = parser.parse_args()
    all_rows = ROWS | head_rows(args.draft)
    sizes = [int(n) for n in args.concurrency.split(",")]
    rows = [name for name in all_rows if any(name.startswith(wanted) for wanted in args.only.split(","))]
    engines = {
        name: Engine(EngineOptions(demo_model_dir(), max_num_seqs=max(sizes), max_model_len=1024, **all_rows[name]))
        for name in rows
    }
    for engine in engines.values():
        engine.warm_up()
    first = next(iter(engines.values()))
    texts = [first.tokenizer.decode(prompt) for prompt in prompts(first, max(sizes))]
    peers = engine_peers.chosen(texts, args.tokens, transformers=args.transformers, vllm=args.vllm, llama=args.llama)
    results: dict[tuple[str, int], list[tuple[float, float, dict[Part, float]]]] = {}
    alone: dict[tuple[str, int], list[float]] = {}
    other: dict[tuple[str, int], list[float]] = {}
    bandwidth: list[float] = []
    block = torch.ones(256 * 2**20 // 4)
    for _ in range(args.rounds):
        bandwidth.append(block.numel() * 4 / min(seconds_of(block.sum, 3) for _ in range(3)))
        for size in sizes:
            for name, engine in engines.items():
                results.setdefault((name, size), []).append(measure(engine, size, args.tokens))
                if engine.options.variant == "off":
                    alone.setdefault((name, size), []).append(seconds_of(linears(engine, size), 20))
        for name, peer in peers.items():
            for size in sizes:
                other.setdefault((name, size), []).append(peer(size))
    for peer in peers.values():
        peer.close()
    print(f"{torch.get_num_threads()} threads, {first.model.dtype}, torch {torch.__version__}, {args.tokens} tokens a request")
    header = "".join(f"{'batch ' + str(n):>12}{'tau':>6}" for n in sizes)
    print(f"{'output tokens/s':16}{header}" + "".join(f"{part:>8}" for part in PARTS) + f"  (of a step at batch {sizes[-1]})")
    for name in rows:
        cells = [(statistics.median(r[0] for r in results[name, n]), results[name, n][0][1]) for n in sizes]
        spent = {part: sum(r[2][part] for r in results[name, sizes[-1]]) for part in PARTS}
        shares = "".join(f"{spent[part] / sum(spent.values()):8.1%}" for part in PARTS)
        print(f"{name:16}" + "".join(f"{speed:12.1f}{tau:6.2f}" for speed, tau in cells) + shares)
    for name in peers:
        print(f"{name:16}" + "".join(f"{statistics.median(other[name, n]):12.1f}{'':6}" for n in sizes))
    rate = statistics.median(bandwidth)
    print(f"\nreading memory: {rate / 1e9:.1f} GB/s")
    print(
        f"{'one step, ms':16}"
        + "".join(f"{'batch ' + str(n):>10}{'linears':>9}{'ratio':>7}" for n in sizes)
        + "   weights alone"
    )
    for name, engine in engines.items():
        if engine.options.variant != "off":
            continue
        steps = {n: statistics.median(n / r[0] for r in results[name, n]) for n in sizes}
        own = {n: statistics.median(alone[name, n]) for n in sizes}
        cells = "".join(f"{steps[n] * 1e3:10.2f}{own[n] * 1e3:9.2f}{steps[n] / own[n]:7.2f}" for n in sizes)
        print(f"{name:16}{cells}{weight_bytes(engine) / rate * 1e3:16.2f}")


if __name__ == "__main__":
    main()
