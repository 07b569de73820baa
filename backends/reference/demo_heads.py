"""The draft heads that come with the project for its demo model, kept small in `shipped/` and written out whole on first use."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from backends.cached import made_once
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

    def make(scratch: Path) -> Path:
        made = scratch / "head"
        expand(made, variant, small, read_target(model, torch.bfloat16))
        return made

    return made_once("heads", f"{model.name}-{variant}-{digest}", make)
