"""Random small checkpoints, written by transformers, with a tokenizer of single bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from backends.reference.batch import Piece, build_batch
from backends.reference.engine import Engine
from backends.reference.heads.block import causal
from backends.reference.kv_cache import KVCache
from backends.reference.sequence import Sequence
from backends.serving import GenerationRequest

EOS = 256
Build = Callable[..., Engine]
VOCAB = 272  # 256 bytes, <eos>, <bos>, and ids that no text gives


def shape(**changes: Any) -> dict[str, Any]:
    """Settings of an 8-layer model with grouped KV heads; a large initializer keeps logits apart."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "tie_word_embeddings": True,
        "bos_token_id": 257,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        **changes,
    }


def save(config: PretrainedConfig, folder: Path, *, seed: int = 0, shard: str = "5GB") -> PreTrainedModel:
    """Write a random float32 model of `config` with its tokenizer, and return it in eval mode."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight") or name.endswith(".bias"):  # ones and zeros would hide a missing norm or bias
            torch.nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=0.2)
    model.save_pretrained(folder, max_shard_size=shard)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path, *, eos: str = "<eos>") -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([eos, "<bos>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token="<bos>")
    fast.chat_template = "{% for m in messages %}{{ bos_token }}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
    fast.save_pretrained(folder)


def request(prompt: list[int], max_tokens: int = 24, **fields: Any) -> GenerationRequest:
    return GenerationRequest(prompt_ids=tuple(prompt), max_tokens=max_tokens, **fields)


def generate(engine: Engine, requests: list[GenerationRequest]) -> list[list[int]]:
    """Output ids of each request, all queued at once."""
    sequences = [engine.add(r) for r in requests]
    while engine.has_work:
        engine.step()
    return [output(sequence) for sequence in sequences]


def output(sequence: Sequence) -> list[int]:
    return sequence.tokens[sequence.prompt_tokens :]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Of 5 to 60 tokens, half of them repetitive, so that n-grams match."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        length = rng.randint(5, 60)
        made.append(
            [rng.randrange(256) for _ in range(length)] if i % 2 else ([rng.randrange(256) for _ in range(6)] * 10)[:length]
        )
    return made


PROMPTS = prompts(16)


def sampled_requests() -> list[GenerationRequest]:
    cuts = [{}, {"top_p": 0.9}, {"top_k": 20}, {"top_k": 50, "top_p": 0.8}]
    return [request(p, temperature=0.8, seed=i, ignore_eos=True, **cuts[i % 4]) for i, p in enumerate(PROMPTS)]


TREE = {"topk": 3, "num_draft_tokens": 12}
CHAINS = ("ngram", "suffix", "draft_model", "medusa", "eagle2", "eagle3", "p_eagle", "mtp")
TREES = ("medusa", "eagle2", "eagle3", "mtp")
HEADS = [(v, {}) for v in CHAINS[3:]] + [(v, TREE) for v in TREES]
ALL = [(v, {}) for v in CHAINS] + [(v, TREE) for v in TREES]


def name(case: object) -> str | None:
    """Of a case's tree settings, in a test's id."""
    return ("tree" if case else "chain") if isinstance(case, dict) else None


def target_pass(engine: Engine, tokens: list[int]) -> tuple[tuple[Tensor, list[Tensor]], KVCache]:
    """The target's last hidden states and captured streams for `tokens`, and a cache of its own, with nothing of the engine's."""
    model = engine.model
    cache = KVCache(model.config, slots=1, rows=len(tokens), dtype=model.dtype, device=model.device)
    batch = build_batch([Piece(0, 0, tokens)], slot_rows=len(tokens), dtype=model.dtype, device=model.device)
    return model.forward(batch, cache, engine.drafter.capture), cache


def head_from_scratch(engine: Engine, tokens: list[int]) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Keys and values of each block [n - 1, kv_heads, head_dim], and outputs, for the true rows of `tokens`."""
    (hidden, captured), _ = target_pass(engine, tokens[:-1])
    head = engine.drafter._head  # type: ignore[attr-defined]
    seen: list[tuple[Tensor, Tensor]] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((k, v))
        return causal()(layer, q, k, v)

    with torch.inference_mode():
        output = head(
            head.embed(torch.tensor(tokens[1:])), head.fuse(captured or [hidden]), torch.arange(len(tokens) - 1), attend
        )
    return seen, output
