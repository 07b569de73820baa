"""The bundled catalogue of published draft heads: which exist for a target, in which layout, and where that was read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

CATALOGUE = Path(__file__).with_name("drafts.yaml")


@dataclass(frozen=True, slots=True)
class KnownDraft:
    """A published draft for one target. `draft` is None where the head lies in the target's own checkpoint (MTP layers)."""

    target: str
    variant: str
    draft: str | None
    layout: str  # eagle, speculators, modelopt, mistral, dflash, transformers, in_target
    source: str  # the page that names it
    trained_context: int | None = None  # tokens; None: unknown


@cache
def catalogue() -> tuple[KnownDraft, ...]:
    """Every entry, in the file's order."""
    document: dict[str, Any] = yaml.safe_load(CATALOGUE.read_text())
    sources = document["sources"]
    return tuple(
        KnownDraft(target=target, **{**entry, "source": sources[entry["source"]]})
        for target, entries in document["targets"].items()
        for entry in entries
    )


def known_drafts(model: str) -> list[KnownDraft]:
    """Heads for `model`, a repository id or a local folder named like one; empty where the catalogue knows none.

    Case is ignored, and so is who owns the copy: a folder ``/models/Llama-3.3-70B-Instruct`` is taken for the model of that name.
    """
    wanted = model.rstrip("/").lower()
    exact = [known for known in catalogue() if known.target.lower() == wanted]
    if exact:
        return exact
    name = wanted.rsplit("/", 1)[-1]
    return [known for known in catalogue() if known.target.lower().rsplit("/", 1)[-1] == name]
