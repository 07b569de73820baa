"""Small checkpoints with random weights in the layouts that the models' authors publish, for a target of any size."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCAB = 49152  # of the tokenizer that the tests copy
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 128, 256, 2, 1, 64, 3
DRAFT_VOCAB = 1024

_SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "dtype": "float32",
}
Tensors = dict[str, np.ndarray]


class Weights:
    """Seeded random matrices by shape."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def matrix(self, rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        return (self._random.standard_normal((rows, columns)) * scale / np.sqrt(columns)).astype(np.float32)

    def layer(self, prefix: str, *, attention_input: int = HIDDEN, bias: bool = False) -> Tensors:
        query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        out = {
            f"{prefix}.self_attn.q_proj.weight": self.matrix(query, attention_input),
            f"{prefix}.self_attn.k_proj.weight": self.matrix(key, attention_input),
            f"{prefix}.self_attn.v_proj.weight": self.matrix(key, attention_input),
            f"{prefix}.self_attn.o_proj.weight": self.matrix(HIDDEN, query),
            f"{prefix}.mlp.gate_proj.weight": self.matrix(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": self.matrix(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": self.matrix(HIDDEN, INTERMEDIATE),
        }
        if bias:
            out |= {
                f"{prefix}.self_attn.{n}_proj.bias": np.zeros(w, np.float32) for n, w in (("q", query), ("k", key), ("v", key))
            }
        return out | ones(f"{prefix}.input_layernorm.weight", f"{prefix}.post_attention_layernorm.weight")


def ones(*names: str) -> Tensors:
    return {name: np.ones(HIDDEN, np.float32) for name in names}


def target(folder: Path, tokenizer_from: Path, *, embedding: float = 3.0) -> Path:
    """A Llama of 3 layers, with the tokenizer of `tokenizer_from`. The larger its embeddings, the more the last token decides."""
    weights = Weights(0)
    tensors = {
        "model.embed_tokens.weight": weights.matrix(VOCAB, HIDDEN, embedding),
        "lm_head.weight": weights.matrix(VOCAB, HIDDEN, 3.0),
    }
    for layer in range(LAYERS):
        tensors |= weights.layer(f"model.layers.{layer}")
    tensors |= ones("model.norm.weight")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "tie_word_embeddings": False,
    }
    return _save(folder, config, tensors, tokenizer_from)


def mimo(folder: Path, tokenizer_from: Path) -> Path:
    """MiMo: a Qwen2 decoder with one multi-token-prediction layer in the same checkpoint."""
    weights = Weights(1)
    tensors = {
        "model.embed_tokens.weight": weights.matrix(VOCAB, HIDDEN, 3.0),
        "lm_head.weight": weights.matrix(VOCAB, HIDDEN, 3.0),
    }
    for layer in range(LAYERS):
        tensors |= weights.layer(f"model.layers.{layer}", bias=True)
    prefix = "model.mtp_layers.0"
    tensors |= weights.layer(prefix, bias=True) | {f"{prefix}.input_proj.weight": weights.matrix(HIDDEN, 2 * HIDDEN)}
    tensors |= ones("model.norm.weight", *(f"{prefix}.{name}_layernorm.weight" for name in ("token", "hidden", "final")))
    config = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    }
    return _save(folder, config, tensors, tokenizer_from)


def eagle3(folder: Path, *, parallel: bool = False) -> Path:
    """EAGLE-3: one layer on embedding and three hidden states, its own small vocabulary; P-EAGLE adds a mask to start from."""
    weights = Weights(2)
    ids = np.arange(DRAFT_VOCAB, dtype=np.int64) * (VOCAB // DRAFT_VOCAB)
    tensors = weights.layer("midlayer", attention_input=2 * HIDDEN) | ones("midlayer.hidden_norm.weight", "norm.weight")
    tensors |= {
        "fc.weight": weights.matrix(HIDDEN, 3 * HIDDEN),
        "lm_head.weight": weights.matrix(DRAFT_VOCAB, HIDDEN),
        "d2t": ids - np.arange(DRAFT_VOCAB),
        "t2d": np.isin(np.arange(VOCAB), ids),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCAB,
        "tie_word_embeddings": False,
    }
    if parallel:
        tensors["mask_hidden"] = weights.matrix(1, 3 * HIDDEN)
        config["ptd_token_id"] = 0
    return _save(folder, config, tensors)


def eagle(folder: Path) -> Path:
    """EAGLE-1/2: `fc` over embedding and hidden state, one layer; the output matrix is the target's.

    Here `fc` keeps the embedding and the layer adds little, so it says what a target of large embeddings often says too.
    """
    weights = Weights(3)
    tensors = weights.layer("layers.0") | {"fc.weight": np.eye(HIDDEN, 2 * HIDDEN, dtype=np.float32)}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"layers.0.{name}.weight"] *= 0.1
    del tensors["layers.0.input_layernorm.weight"]  # the first layer of such a head has none
    config = {"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama", "num_hidden_layers": 1}
    return _save(folder, {**config, "tie_word_embeddings": False}, tensors)


def medusa(folder: Path, lm_head: np.ndarray, heads: int = 3) -> Path:
    """Medusa: per head a residual block and an output matrix (here the target's)."""
    tensors: Tensors = {}
    for head in range(heads):
        tensors[f"{head}.0.linear.weight"] = np.zeros((HIDDEN, HIDDEN), np.float32)
        tensors[f"{head}.0.linear.bias"] = np.zeros(HIDDEN, np.float32)
        tensors[f"{head}.1.weight"] = lm_head
    config = {"model_type": "medusa", "architectures": ["MedusaModel"], "medusa_num_heads": heads, "medusa_num_layers": 1}
    return _save(folder, config, tensors)


def _save(folder: Path, config: Mapping[str, Any], tensors: Tensors, tokenizer_from: Path | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**_SHAPE, **config}))
    save_file(tensors, folder / "model.safetensors")
    if tokenizer_from:
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            if (tokenizer_from / name).exists():
                shutil.copy(tokenizer_from / name, folder / name)
    return folder
