"""The user's cache, and folders in it that are made once, whole or not at all."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """Where things of this kind are kept (XDG base directories); it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spectune" / kind


def made_once(kind: str, name: str, make: Callable[[Path], Path]) -> Path:
    """The folder `name` among the cache's `kind`, made on the first call.

    Several processes may call at once: one makes it, the others wait. `make` gets a scratch folder beside it and returns the
    folder in there that takes the place.
    """
    cache = cache_folder(kind)
    folder = cache / name
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=cache, prefix=f".{name}-") as scratch:
                make(Path(scratch)).rename(folder)
    return folder
