"""Reading `config.json` of a Llama-family checkpoint (Llama 2/3, SmolLM2, Mistral, Qwen2, Qwen3, MiMo) in HF layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.types import ConfigError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MiMoForCausalLM")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: `kind` is default, linear (positions ÷ `factor`) or llama3 (long wavelengths ÷ `factor`)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class Packing:
    """How a quantized checkpoint holds its linear layers: 4 bits, `method` awq or gptq, a scale and a zero for each `group` of
    inputs. The zeros meant are those in the file plus `zero_offset`."""

    method: str
    group: int
    zero_offset: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder. Biases and q/k norms are read from the weights: they are there or they are not."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    sliding_window: int | None  # a token sees itself and the `sliding_window - 1` tokens before it
    context_tokens: int
    dtype: str  # of the checkpoint: bfloat16, float16, float32
    eos_ids: frozenset[int]
    mtp_modules: int = 0  # multi-token-prediction modules in the same checkpoint, after the blocks
    packing: Packing | None = None  # of a checkpoint that is quantized already


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        ConfigError: no such file, or not a JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} has no {path.name}: give a model directory in Hugging Face layout") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return data


def read_config(folder: Path) -> ModelConfig:
    """The model's shape from `config.json` and its end tokens from `generation_config.json` where there is one.

    Raises:
        ConfigError: a missing file or field, or something this engine does not run.
    """
    if not folder.is_dir():
        raise ConfigError(f"model directory {folder} does not exist")
    path = folder / "config.json"
    raw = read_json(path)
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"{path}: architecture {architecture} is not supported; the engine runs {', '.join(ARCHITECTURES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{path}: hidden_act {raw['hidden_act']} is not supported, only silu")
    try:
        heads = int(raw["num_attention_heads"])
        return ModelConfig(
            architecture=architecture,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
            rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=read_rope(raw, path),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            sliding_window=_sliding_window(raw, architecture, path),
            context_tokens=int(raw["max_position_embeddings"]),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            eos_ids=_eos_ids(folder, raw),
            mtp_modules=int(raw.get("num_nextn_predict_layers") or 0),
            packing=read_packing(raw, path),
        )
    except KeyError as error:
        raise ConfigError(f"{path} has no field {error}") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None


ZERO_OFFSETS = {("awq", "gemm"): 0, ("gptq", "gptq"): 1, ("gptq", "gptq_v2"): 0}
"""The layouts that can be read: quantization method and format."""


def read_packing(raw: Mapping[str, Any], path: Path) -> Packing | None:
    """`quantization_config` as AutoAWQ, AutoGPTQ, GPTQModel and transformers write it; None where there is none. A format that is
    not said is the first of its method, as these libraries take it.

    Raises:
        ConfigError: a checkpoint quantized in another way.
    """
    given = raw.get("quantization_config")
    if not given:
        return None
    method, bits, group = given.get("quant_method"), given.get("bits"), given.get("group_size")
    default = {"awq": "gemm", "gptq": "gptq"}.get(method)
    layout = str(given.get("checkpoint_format") or given.get("format") or given.get("version") or default).lower()
    if (method, layout) not in ZERO_OFFSETS:
        what = f"{method} in the layout {layout}" if default else f"{method}"
        fault = f"quantized by {what}; the engine reads {', '.join(f'{m} ({name})' for m, name in ZERO_OFFSETS)}"
    elif bits != 4:
        fault = f"quantized to {bits} bits by {method}; the engine reads 4"
    elif group not in (64, 128):
        fault = f"quantized in groups of {group} by {method}; the engine reads groups of 64 and 128"
    else:
        return Packing(method, group, ZERO_OFFSETS[method, layout])
    raise ConfigError(f"{path}: the checkpoint is {fault}. Or give an unquantized one and use --quantization")


def quantization_fault(config: ModelConfig, asked: str) -> str | None:
    """Why the weights of a checkpoint cannot be quantized to `asked`, in one line; None if they can."""
    if config.packing is None or asked == "none":
        return None
    return f"the checkpoint holds 4-bit weights ({config.packing.method}): they run as they are, with quantization none, not {asked}"


def read_rope(raw: Mapping[str, Any], path: Path) -> RopeConfig:
    """`rope_parameters` is how transformers 5 writes it; `rope_theta` with `rope_scaling` is the older spelling."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(f"{path}: rope type '{kind}' is not supported (default, linear and llama3 are)")
    theta = float(given.get("rope_theta", raw.get("rope_theta", 10000.0)))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, float(given["factor"]))
    return RopeConfig(
        theta,
        kind,
        float(given["factor"]),
        float(given["low_freq_factor"]),
        float(given["high_freq_factor"]),
        int(given["original_max_position_embeddings"]),
    )


def _sliding_window(raw: Mapping[str, Any], architecture: str, path: Path) -> int | None:
    if architecture == "MistralForCausalLM":
        return raw.get("sliding_window")
    if raw.get("use_sliding_window"):
        raise ConfigError(f"{path}: use_sliding_window mixes full and windowed layers, which is not supported")
    return None


def _eos_ids(folder: Path, raw: Mapping[str, Any]) -> frozenset[int]:
    path = folder / "generation_config.json"
    eos = read_json(path).get("eos_token_id") if path.exists() else None
    if eos is None:
        eos = raw.get("eos_token_id")
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])
