"""What quantizing weights or the KV cache costs in quality: greedy agreement and mean KL divergence, teacher-forced on given prompts.

Run as ``python -m backends.reference.quality``: reads prompts as JSON lines on standard input, prints a JSON list.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backends.reference.batch import Piece, build_batch
from backends.reference.engine import Engine
from backends.reference.kv_cache import KVCache
from backends.reference.loader import load_model
from backends.reference.model import Decoder
from backends.reference.options import EngineOptions
from backends.serving import GenerationRequest
from backends.types import ConfigError


@dataclass(frozen=True, slots=True)
class Quality:
    """Over `tokens` output positions of the baseline's own greedy text."""

    greedy_agreement: float  # share of positions where both have the same most likely token
    mean_kl: float  # nats, KL(baseline || quantized)
    tokens: int


def compare(baseline: Iterable[Tensor], other: Iterable[Tensor]) -> Quality:
    """Pairs of logits [n, vocab], teacher-forced on the same tokens -> agreement and KL over all n of all pairs."""
    same = tokens = 0
    kl = 0.0
    for p_logits, q_logits in zip(baseline, other, strict=True):
        p, q = p_logits.double().log_softmax(-1), q_logits.double().log_softmax(-1)
        same += int((p_logits.argmax(-1) == q_logits.argmax(-1)).sum())
        kl += float((p.exp() * (p - q)).sum())
        tokens += len(p)
    return Quality(same / tokens, kl / tokens, tokens)


def greedy_texts(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Prompt and greedy output of each prompt, in order."""
    sequences = [engine.add(GenerationRequest(tuple(ids), max_tokens)) for ids in prompts]
    while engine.has_work:
        engine.step()
    return [sequence.tokens for sequence in sequences]


def teacher_forced(model: Decoder, tokens: Sequence[int], prompt_tokens: int, stored: str) -> Tensor:
    """Logits that predict each output token given all before it, over a KV cache of type `stored`: [outputs, vocab] in float32."""
    cache = KVCache(model.config, slots=1, rows=len(tokens), dtype=model.dtype, device=model.device, stored=stored)
    pieces = [Piece(0, 0, list(tokens[:-1]))]
    batch = build_batch(
        pieces, slot_rows=cache.rows, dtype=model.dtype, device=model.device, window=model.config.sliding_window
    )
    hidden, _ = model.forward(batch, cache)
    return model.logits(hidden[prompt_tokens - 1 :])


def measure(
    prompts: Sequence[Mapping[str, Any]], *, baseline: EngineOptions, others: Sequence[EngineOptions], max_tokens: int
) -> list[Quality]:
    """Quality of each of `others` against `baseline`: one model with quantizations of its weights and types of its KV cache, on rows
    with `messages` or `prompt`.

    Raises:
        ConfigError: a model that cannot be loaded.
    """
    engine = Engine(baseline)
    tokenizer = engine.tokenizer
    encoded = [
        tokenizer.encode_chat(row["messages"]) if row.get("messages") else tokenizer.encode(row["prompt"]) for row in prompts
    ]
    texts = greedy_texts(engine, encoded, max_tokens)
    lengths = [len(ids) for ids in encoded]

    def logits(model: Decoder, options: EngineOptions) -> Iterator[Tensor]:
        return (teacher_forced(model, text, n, options.kv_cache_dtype) for text, n in zip(texts, lengths, strict=True))

    reference = list(logits(engine.model, baseline))
    found = []
    for other in others:
        model = load_model(other.model, quantization=other.quantization, max_positions=engine.max_model_len)
        found.append(compare(reference, logits(model, other)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m backends.reference.quality", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--baseline", nargs=2, metavar=("WEIGHTS", "KV_CACHE"), default=("none", "auto"))
    parser.add_argument("--other", nargs=2, metavar=("WEIGHTS", "KV_CACHE"), action="append", required=True)
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    prompts = [json.loads(line) for line in sys.stdin if line.strip()]
    torch.set_grad_enabled(False)
    try:
        baseline, *others = (
            EngineOptions(args.model, quantization=weights, kv_cache_dtype=kv_cache, max_num_seqs=8)
            for weights, kv_cache in (args.baseline, *args.other)
        )
        found = measure(prompts, baseline=baseline, others=others, max_tokens=args.max_tokens)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps([{"greedy_agreement": q.greedy_agreement, "mean_kl": q.mean_kl} for q in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
