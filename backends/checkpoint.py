"""A model directory as preflight sees it: configuration, tokenizer, tensor shapes. No weights are loaded and no torch is needed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from backends.types import ConfigError

_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_DRAFT_MAPS = ("d2t", "t2d")


@dataclass(frozen=True, slots=True)
class Tensor:
    dtype: str  # as safetensors names it: BF16, F32, I64, BOOL, F8_E4M3, ...
    shape: tuple[int, ...]
    file: Path

    @property
    def size_bytes(self) -> int:
        size = _BYTES.get(self.dtype, 1)
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True)
class Checkpoint:
    """`config` is config.json as it is, `decoder` the part of it that describes the layers (nested in some layouts)."""

    name: str  # what the user gave
    path: Path
    config: Mapping[str, Any]
    tokenizer: Mapping[str, Any] | None  # tokenizer.json
    tokenizer_config: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    chat_template: bool = False

    @property
    def decoder(self) -> Mapping[str, Any]:
        nested = self.config.get("transformer_layer_config") or self.config.get("text_config")
        return {**self.config, **nested} if isinstance(nested, Mapping) else self.config

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    @cached_property
    def token_ids(self) -> dict[str, int]:
        """Every token of the tokenizer, added ones included, with its id."""
        tokenizer = self.tokenizer or {}
        vocab = tokenizer.get("model", {}).get("vocab", {})
        if isinstance(vocab, list):  # unigram: [[token, score], ...] in the order of ids
            vocab = {entry[0]: index for index, entry in enumerate(vocab)}
        return {**vocab, **{entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", [])}}

    def tensor(self, *endings: str) -> Tensor | None:
        """The first tensor whose name is, or ends in a dot and, one of `endings`."""
        for ending in endings:
            for name, tensor in self.tensors.items():
                if name == ending or name.endswith("." + ending):
                    return tensor
        return None

    def draft_map(self, name: str) -> list[int] | None:
        """Content of the draft vocabulary map `d2t` (offsets) or `t2d` (flags); None where the checkpoint has none."""
        found = next((key for key in self.tensors if key == name or key.endswith("." + name)), None)
        if found is None or name not in _DRAFT_MAPS:
            return None
        from safetensors import safe_open

        with safe_open(self.tensors[found].file, framework="numpy") as file:
            return [int(value) for value in file.get_tensor(found)]


def find(name: str) -> Path | None:
    """The directory of `name`: a local one, or the newest snapshot of a hub model in the local cache. None where there is none."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return None
    home = Path(os.environ.get("HF_HOME", Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{name.replace('/', '--')}"
    snapshots = [path for path in (hub / "snapshots").glob("*") if (path / "config.json").exists()]
    return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)


def read(name: str) -> Checkpoint | None:
    """The checkpoint `name`, None where it is not on this machine.

    Raises:
        ConfigError: the directory has no config.json, or a file in it cannot be read.
    """
    path = find(name)
    if path is None:
        return None
    if not (path / "config.json").exists():
        raise ConfigError(f"{path} has no config.json: is it a model directory?")
    tokenizer_config = _json(path / "tokenizer_config.json") or {}
    return Checkpoint(
        name=name,
        path=path,
        config=_json(path / "config.json") or {},
        tokenizer=_json(path / "tokenizer.json"),
        tokenizer_config=tokenizer_config,
        tensors=_tensors(path),
        chat_template=bool(tokenizer_config.get("chat_template")) or (path / "chat_template.jinja").exists(),
    )


def declared_base(checkpoint: Checkpoint) -> tuple[str | None, tuple[str, ...]]:
    """Name and architectures of the model that a draft says it was trained for; None and () where it does not say."""
    verifier = checkpoint.config.get("speculators_config", {}).get("verifier", {})
    name = verifier.get("name_or_path") or checkpoint.config.get("base_model_name_or_path") or _card_base(checkpoint.path)
    return name, tuple(verifier.get("architectures") or ())


def _card_base(path: Path) -> str | None:
    """`base_model:` in the front matter of the model card; its first entry where it is a list."""
    card = path / "README.md"
    text = card.read_text(errors="replace") if card.exists() else ""
    match = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    found = re.search(r"^base_model:[ \t]*(?:\n\s*-\s*)?(\S+)", match.group(1), re.MULTILINE) if match else None
    return found.group(1).strip("\"'") if found else None


def _json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return data if isinstance(data, dict) else None


def _tensors(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        except (ValueError, OSError, MemoryError) as error:
            raise ConfigError(f"{file} is no safetensors file: {error}") from None
        for name, entry in header.items():
            if name != "__metadata__":
                tensors[name] = Tensor(entry["dtype"], tuple(entry["shape"]), file)
    return tensors
