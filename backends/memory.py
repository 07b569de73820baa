"""What weights and KV cache need, from configuration and tensor shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.checkpoint import Checkpoint

_DTYPE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}
_KV_BYTES = {"fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0, "int8": 1.0, "float16": 2.0, "bfloat16": 2.0, "float32": 4.0}
_WEIGHT_SHARE = {"fp8": 0.5, "int8": 0.5, "int4": 0.25, "bitsandbytes": 0.25}  # of 16-bit weights, when quantized while loading
USABLE = 0.9  # of GPU memory, which is vLLM's default; the rest goes to activations, graphs and the driver


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """A prediction, not a measurement: activations and graphs are only covered by the share that is left free."""

    weight_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int  # KV-cache capacity of the whole server; negative: the weights do not fit


def kv_bytes_per_token(decoder: Mapping[str, Any], kv_cache_dtype: str, layers: int | None = None) -> int:
    """2 × layers × KV heads × head dimension × bytes; for latent attention (DeepSeek-V2, section 2.1) the compressed vector."""
    dtype = str(decoder.get("dtype") or decoder.get("torch_dtype") or "bfloat16")
    element = _KV_BYTES.get(kv_cache_dtype, _DTYPE_BYTES.get(dtype.removeprefix("torch."), 2.0))
    layers = int(decoder.get("num_hidden_layers", 1)) if layers is None else layers
    if decoder.get("kv_lora_rank"):
        return round(layers * (int(decoder["kv_lora_rank"]) + int(decoder.get("qk_rope_head_dim", 0))) * element)
    heads = int(decoder.get("num_attention_heads", 1))
    kv_heads = int(decoder.get("num_key_value_heads") or heads)
    head_dim = int(decoder.get("head_dim") or int(decoder.get("hidden_size", 0)) // heads)
    return round(2 * layers * kv_heads * head_dim * element)


def estimate(
    target: Checkpoint,
    draft: Checkpoint | None,
    *,
    gpu_memory_bytes: int,
    kv_cache_dtype: str = "auto",
    weight_quantization: str = "none",
    draft_layers: int | None = None,
    tensor_parallel: int = 1,
) -> MemoryEstimate:
    """KV-cache tokens that fit beside the weights on `tensor_parallel` GPUs of `gpu_memory_bytes` each."""
    share = 1.0 if "quantization_config" in target.config else _WEIGHT_SHARE.get(weight_quantization, 1.0)
    weights = round(target.weight_bytes * share)
    per_token = kv_bytes_per_token(target.decoder, kv_cache_dtype)
    if draft is not None:
        weights += draft.weight_bytes
        per_token += kv_bytes_per_token(draft.decoder, kv_cache_dtype, draft_layers)
    free = gpu_memory_bytes * tensor_parallel * USABLE - weights
    return MemoryEstimate(weights, per_token, int(free // per_token) if per_token else 0)
