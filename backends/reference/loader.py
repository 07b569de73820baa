"""From a model directory to a `Decoder`: safetensors, one file or sharded, tied or untied embeddings, plain weights or packed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from backends.reference.config import ModelConfig, quantization_fault, read_config, read_json
from backends.reference.model import Decoder, Layer
from backends.reference.quantization import HEADS, LINEARS, Make
from backends.reference.quantization.checkpoint import read_int4
from backends.reference.quantization.dense import Linear, cpu_has_bf16
from backends.reference.quantization.int4 import Int4
from backends.types import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(asked: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's dtype, or float32 on a CPU without bf16 instructions (where bf16 is slower than float32).

    Raises:
        ConfigError: no such dtype.
    """
    name = config.dtype if asked == "auto" else asked
    if name not in DTYPES:
        raise ConfigError(f"dtype '{name}' is not supported: choose from auto, {', '.join(DTYPES)}")
    if asked == "auto" and device.type == "cpu" and not cpu_has_bf16():
        return torch.float32
    return DTYPES[name]


def load_model(
    folder: Path, *, dtype: str = "auto", quantization: str = "none", device: str = "cpu", max_positions: int | None = None
) -> Decoder:
    """The model in `folder`, weights quantized as asked while they are read; what is packed in 4 bits already stays so.

    Raises:
        ConfigError: missing files or tensors, tensors of an unknown name or shape, an unsupported architecture, a quantization of
            weights that are quantized already.
    """
    config = read_config(folder)
    if quantization not in LINEARS:
        raise ConfigError(f"quantization '{quantization}' is not supported: choose from {', '.join(LINEARS)}")
    if fault := quantization_fault(config, quantization):
        raise ConfigError(f"{folder}: {fault}")
    place = torch.device(device)
    kind = resolve_dtype(dtype, config, place)
    weights = _Weights(folder)

    def tensor(name: str, *shape: int) -> Tensor:
        return weights.take(name, shape).to(device=place, dtype=kind)

    def linear(parts: dict[str, int], columns: int, make: Make = LINEARS[quantization]) -> Linear:
        """One layer of the outputs of `parts`, name to count, one after another."""
        biased = any(f"{name}.bias" in weights for name in parts)
        bias = torch.cat([tensor(f"{name}.bias", rows) for name, rows in parts.items()]) if biased else None
        if config.packing is None or not any(f"{name}.qweight" in weights for name in parts):
            return make(torch.cat([tensor(f"{name}.weight", rows, columns) for name, rows in parts.items()]), bias)
        packed = [
            read_int4(config.packing, weights.take, name, rows, columns, ordered=f"{name}.g_idx" in weights)
            for name, rows in parts.items()
        ]
        q, scale_zero = torch.cat([q for q, _ in packed]), torch.cat([both for _, both in packed], dim=1)
        return Int4(q.to(place), scale_zero.to(place), bias)

    embedding = tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = [_layer(config, index, tensor, linear, weights) for index in range(config.num_layers)]
    norm = tensor("model.norm.weight", config.hidden_size)
    if config.tied_embeddings:
        weights.drop("lm_head.weight")
        head = HEADS[quantization](embedding, None)
    else:
        head = linear({"lm_head": config.vocab_size}, config.hidden_size, HEADS[quantization])
    for module in range(config.mtp_modules):  # read by `heads.load` where they are to draft
        weights.drop_all(f"model.mtp_layers.{module}.", f"model.layers.{config.num_layers + module}.")
    weights.finish()
    return Decoder(
        config, embedding=embedding, layers=layers, norm=norm, head=head, positions=max_positions or config.context_tokens
    )


def _layer(
    config: ModelConfig,
    index: int,
    tensor: Callable[..., Tensor],
    linear: Callable[[dict[str, int], int], Linear],
    weights: _Weights,
) -> Layer:
    prefix = f"model.layers.{index}."
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def fused(parts: dict[str, int], columns: int) -> Linear:
        return linear({prefix + name: rows for name, rows in parts.items()}, columns)

    def head_norm(name: str) -> Tensor | None:
        full = f"{prefix}self_attn.{name}.weight"
        return tensor(full, config.head_dim) if full in weights else None

    return Layer(
        input_norm=tensor(f"{prefix}input_layernorm.weight", hidden),
        qkv=fused({"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}, hidden),
        q_norm=head_norm("q_norm"),
        k_norm=head_norm("k_norm"),
        out=fused({"self_attn.o_proj": hidden}, q_size),
        post_norm=tensor(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=fused({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden),
        down=fused({"mlp.down_proj": hidden}, inner),
    )


class _Weights:
    """Tensors of a checkpoint by name, each taken once; what nobody took at the end is an error."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = {}
        index = folder / "model.safetensors.index.json"
        if index.exists():
            names = sorted(set(read_json(index).get("weight_map", {}).values()))
        else:
            names = ["model.safetensors"] if (folder / "model.safetensors").exists() else []
        if not names:
            raise ConfigError(f"{folder} has no weights: expected model.safetensors or model.safetensors.index.json")
        for name, file in self._open(names):
            for key in file.keys():  # noqa: SIM118 - safe_open has keys() and is not a mapping
                self._files[key] = (name, file)

    def _open(self, names: list[str]) -> Iterator[tuple[str, safe_open]]:
        for name in names:
            path = self._folder / name
            try:
                yield name, safe_open(path, framework="pt")
            except (FileNotFoundError, SafetensorError) as error:
                raise ConfigError(f"weights {path} cannot be read: {error}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._files:
            raise ConfigError(f"{self._folder}: the weights lack tensor {name}")
        _, file = self._files.pop(name)
        tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"{self._folder}: tensor {name} has shape {list(tensor.shape)}, config.json says {list(shape)}")
        return tensor

    def drop(self, name: str) -> None:
        self._files.pop(name, None)

    def drop_all(self, *prefixes: str) -> None:
        self._files = {name: file for name, file in self._files.items() if not name.startswith(prefixes)}

    def finish(self) -> None:
        left = sorted(name for name in self._files if not name.endswith("rotary_emb.inv_freq"))
        if left:
            raise ConfigError(f"{self._folder}: {len(left)} tensors this engine does not know, such as {left[0]}")
