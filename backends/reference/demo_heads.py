"""The draft heads that come with the project for its demo model, kept small in `shipped/` and written out whole on first use."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from pathlib import Path

import torch

from backends.reference.demo_model import demo_model_dir
from backends.reference.heads.export import expand
from backends.reference.heads.files import read_target
from backends.types import ConfigError

SHIPPED = Path(__file__).parent / "heads" / "shipped"


def shipped_variants() -> list[str]:
    """Variants that the demo model has a head for."""
    return sorted(path.parent.name for path in SHIPPED.glob("*/model.safetensors"))


def demo_head_dir(variant: str) -> Path:
    """The head of `variant` for the demo model in its published layout (bf16), in the user's cache; made on the first call. Every
    engine that has the variant can load it.

    Raises:
        ConfigError: no such head is shipped.
        BackendError: the demo model cannot be had.
    """
    small = SHIPPED / variant
    if not (small / "model.safetensors").exists():
        raise ConfigError(
            f"no {variant} head for the demo model is shipped: there are {', '.join(shipped_variants()) or 'none'}"
        )
    model = demo_model_dir()
    digest = hashlib.sha256((small / "model.safetensors").read_bytes() + (small / "config.json").read_bytes()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spectune" / "heads"
    folder = cache / f"{model.name}-{variant}-{digest}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=cache, prefix=f".{folder.name}-") as scratch:
                made = Path(scratch) / "head"
                expand(made, variant, small, read_target(model, torch.bfloat16))
                made.rename(folder)
    return folder
