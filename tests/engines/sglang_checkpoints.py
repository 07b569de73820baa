"""Checkpoint folders that hold a configuration alone: enough for SGLang's argument parser, nothing to load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 72, "vocab_size": 49152,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "torch_dtype": "bfloat16",
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "target": _LLAMA,
    "draft": {**_LLAMA, "num_hidden_layers": 2},
    "eagle": {**_LLAMA, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1},
    "eagle3": {**_LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 4096},
    "dflash": {**_LLAMA, "architectures": ["DFlashDraftModel"], "num_hidden_layers": 2},
    "dspark": {**_LLAMA, "architectures": ["DSparkDraftModel"], "num_hidden_layers": 2},
    "mtp_target": {
        **_LLAMA, "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "num_nextn_predict_layers": 1,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
}  # fmt: skip


def write_checkpoints(folder: Path) -> None:
    for name, configuration in CONFIGURATIONS.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(configuration))
