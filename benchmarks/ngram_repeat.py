"""Prompt lookup where it shines: "repeat this text" at batch 1, off and ngram interleaved in one run, end to end.

    python benchmarks/ngram_repeat.py [--k 6] [--rounds 2]

The task's end-to-end time (prompt and all tokens) of each variant, and their ratio. The greedy texts must be equal.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from backends.reference.demo_model import demo_model_dir
from backends.reference.engine import Engine
from backends.reference.options import EngineOptions
from backends.serving import GenerationRequest

TEXTS = (
    "The harbour froze in the second week of January. Boats that had not been pulled ashore stood at odd angles in the grey "
    "ice, and the ferry to the island was replaced by a man with a sledge, who charged by weight and refused to carry pianos.",
    "def moving_average(values, window):\n    total = sum(values[:window])\n    averages = [total / window]\n"
    "    for i in range(window, len(values)):\n        total += values[i] - values[i - window]\n"
    "        averages.append(total / window)\n    return averages",
    "Add the flour, the sugar and a pinch of salt to the bowl. Beat the eggs with the milk, pour them in slowly and stir until "
    "the batter is smooth. Let it rest for half an hour, then bake it in a hot pan with a little butter.",
)


def run(engine: Engine, text: str) -> tuple[float, list[int]]:
    messages = [{"role": "user", "content": f"Repeat this text exactly, word for word:\n\n{text}"}]
    prompt = engine.tokenizer.encode_chat(messages)
    start = time.perf_counter()
    sequence = engine.add(GenerationRequest(tuple(prompt), max_tokens=len(engine.tokenizer.encode(text)) + 8))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start, sequence.tokens[sequence.prompt_tokens :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--k", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    # float32: the two texts are compared, and in bfloat16 near-ties flip with the shape of a pass
    common = {"model": demo_model_dir(), "max_num_seqs": 1, "max_model_len": 2048, "dtype": "float32"}
    off, ngram = Engine(EngineOptions(**common)), Engine(EngineOptions(**common, variant="ngram", k=args.k))
    off.warm_up()
    ngram.warm_up()
    ratios = []
    for _ in range(args.rounds):
        for text in TEXTS:
            (off_s, expected), (ngram_s, got) = run(off, text), run(ngram, text)
            if got != expected:
                raise SystemExit("the two variants gave different text")
            ratios.append(off_s / ngram_s)
            print(f"{len(got):4} tokens  off {off_s:6.2f} s  ngram {ngram_s:6.2f} s  speed-up {ratios[-1]:.2f}")
    counters = ngram.counters
    tau = (counters.generated_tokens - counters.first_tokens) / counters.decode_steps
    print(f"median speed-up {statistics.median(ratios):.2f}, tau {tau:.2f}, K={args.k}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
