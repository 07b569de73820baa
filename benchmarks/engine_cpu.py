"""Output tokens/s of the reference engine on the demo model at concurrency 1, 4 and 16, by weight type and drafter.

    python benchmarks/engine_cpu.py [--tokens 48] [--concurrency 1,4,16] [--only off,int4] [--draft eagle3=DIR ...]

Closed loop over real prompts in one process, no HTTP. Rows are interleaved in `--rounds` rounds, so that drift of the machine
falls on all of them; the median round is printed. `tau` is tokens after each sequence's first ÷ decode steps. The last columns
split the time of a step at the largest concurrency: what the drafter, the target's pass, the choice of tokens and everything else
(scheduling, text, counting) take. `--draft` adds rows for a draft head, as a chain of 4 and, where it has one, a tree.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from backends.reference.demo_model import demo_model_dir
from backends.reference.engine import Engine
from backends.reference.options import TREES, EngineOptions
from backends.reference.step_clock import PARTS, Part
from backends.serving import GenerationRequest

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", help="names of rows, or how they start")
    parser.add_argument("--draft", action="append", default=[], metavar="VARIANT=DIR")
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
    results: dict[tuple[str, int], list[tuple[float, float, dict[Part, float]]]] = {}
    for _ in range(args.rounds):
        for size in sizes:
            for name, engine in engines.items():
                results.setdefault((name, size), []).append(measure(engine, size, args.tokens))
    dtype = next(iter(engines.values())).model.dtype
    print(f"{torch.get_num_threads()} threads, {dtype}, torch {torch.__version__}, {args.tokens} tokens a request")
    header = "".join(f"{'batch ' + str(n):>12}{'tau':>6}" for n in sizes)
    print(f"{'output tokens/s':16}{header}" + "".join(f"{part:>8}" for part in PARTS) + f"  (of a step at batch {sizes[-1]})")
    for name in rows:
        cells = [(statistics.median(r[0] for r in results[name, n]), results[name, n][0][1]) for n in sizes]
        spent = {part: sum(r[2][part] for r in results[name, sizes[-1]]) for part in PARTS}
        shares = "".join(f"{spent[part] / sum(spent.values()):8.1%}" for part in PARTS)
        print(f"{name:16}" + "".join(f"{speed:12.1f}{tau:6.2f}" for speed, tau in cells) + shares)


if __name__ == "__main__":
    main()
