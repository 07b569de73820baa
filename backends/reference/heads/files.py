"""Tensors of a head's directory by published name, each taken once, and the few weights a head borrows from its target."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from backends.reference.config import ModelConfig, read_config
from backends.types import ConfigError

SCALE = "_scale"  # int8 tensor NAME goes with float NAME_scale [rows]


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """What heads share with their target: `embedding` and `output` (LM head) [vocab, hidden], one tensor where they are tied, and
    `norm` [hidden], the last one."""

    folder: Path
    config: ModelConfig
    embedding: Tensor
    output: Tensor
    norm: Tensor


def read_target(folder: Path, dtype: torch.dtype) -> TargetWeights:
    """Embedding, LM head and last norm of the model in `folder`; the rest of it is not read.

    Raises:
        ConfigError: the directory is not a model this engine runs, or lacks these tensors.
    """
    config = read_config(folder)
    wanted = ["model.embed_tokens.weight", "model.norm.weight"] + ["lm_head.weight"] * (not config.tied_embeddings)
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with _open(path) as file:
            found |= {name: file.get_tensor(name).to(dtype) for name in wanted if name in file.keys()}  # noqa: SIM118
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ConfigError(f"{folder}: the weights lack tensor {missing[0]}")
    return TargetWeights(
        folder, config, found[wanted[0]], found[wanted[-1] if len(wanted) == 3 else wanted[0]], found[wanted[1]]
    )


class HeadFile:
    """Tensors of a directory. Every name must be taken in the end, and with the shape that the configuration says."""

    def __init__(self, folder: Path, only: str = "") -> None:
        """Reads safetensors, or else `.pt` / `.bin` without running what is in them. `only`: a prefix; other names are not ours.

        Raises:
            ConfigError: no weights, or a file that cannot be read.
        """
        self.folder = folder
        self.pickled: str | None = None
        self._tensors = {name: tensor for name, tensor in self._read() if name.startswith(only)}
        for name in [name for name in self._tensors if f"{name}{SCALE}" in self._tensors]:
            scale = self._tensors.pop(f"{name}{SCALE}").float()
            self._tensors[name] = self._tensors[name].float() * scale[:, None]

    def _read(self) -> Iterable[tuple[str, Tensor]]:
        paths = sorted(self.folder.glob("*.safetensors"))
        for path in paths:
            with _open(path) as file:
                for name in file.keys():  # noqa: SIM118 - safe_open has keys() and is not a mapping
                    yield name, file.get_tensor(name)
        if paths:
            return
        pickles = [*sorted(self.folder.glob("*.pt")), *sorted(self.folder.glob("*.bin"))]
        if not pickles:
            raise ConfigError(f"{self.folder} has no weights: expected .safetensors, or .pt / .bin")
        path = pickles[0]
        self.pickled = path.name
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged or unsafe pickle raises half a dozen kinds
            raise ConfigError(f"{path} cannot be read as plain tensors: {str(error).splitlines()[0]}") from None
        if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) for t in loaded.values()):
            raise ConfigError(f"{path} is not a dictionary of tensors")
        yield from loaded.items()

    @property
    def names(self) -> list[str]:
        return sorted(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def all(self) -> dict[str, Tensor]:
        """Every tensor, as if each had been taken."""
        tensors, self._tensors = self._tensors, {}
        return tensors

    def rename(self, old: str, new: str) -> None:
        """Names that start with `old` start with `new` from now on."""
        self._tensors = {
            new + name.removeprefix(old) if name.startswith(old) else name: tensor for name, tensor in self._tensors.items()
        }

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor, of exactly this shape.

        Raises:
            ConfigError: it is not there, or has another shape.
        """
        if name not in self._tensors:
            raise ConfigError(f"{self.folder}: the weights lack tensor {name}")
        tensor = self._tensors.pop(name)
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"{self.folder}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        return tensor

    def optional(self, name: str, *shape: int) -> Tensor | None:
        return self.take(name, *shape) if name in self else None

    def take_flat(self, name: str) -> Tensor:
        """A vector, whatever leading ones its shape has."""
        tensor = self.take(name, *self._tensors[name].shape) if name in self else self.take(name)
        return tensor.flatten()

    def width(self, name: str) -> int:
        """Columns of a matrix that decides a size itself; it stays to be taken."""
        self.size(name)
        return int(self._tensors[name].shape[-1])

    def keep(self, wanted: Callable[[str], bool]) -> None:
        """Forget every name that is not wanted: it belongs to somebody else."""
        self._tensors = {name: tensor for name, tensor in self._tensors.items() if wanted(name)}

    def size(self, name: str) -> int:
        """Rows of a tensor that decides a size itself."""
        if name not in self._tensors:
            raise ConfigError(f"{self.folder}: the weights lack tensor {name}")
        return int(self._tensors[name].shape[0])

    def count(self, prefix: str) -> int:
        """How many of `prefix`0., `prefix`1., ... there are."""
        numbers = {name.removeprefix(prefix).split(".")[0] for name in self._tensors if name.startswith(prefix)}
        found = sorted(int(number) for number in numbers if number.isdigit())
        if found != list(range(len(found))):
            raise ConfigError(f"{self.folder}: tensors {prefix}N are numbered {found}, expected 0 to {len(found) - 1}")
        return len(found)

    def finish(self) -> None:
        """Raises ConfigError, naming them, where tensors are left that nobody took."""
        left = [name for name in self.names if not name.endswith("rotary_emb.inv_freq")]
        if left:
            shown = ", ".join(f"{name} {list(self._tensors[name].shape)}" for name in left[:3])
            raise ConfigError(f"{self.folder}: {len(left)} tensors this loader does not know: {shown}")


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (FileNotFoundError, SafetensorError) as error:
        raise ConfigError(f"weights {path} cannot be read: {error}") from None
