"""Folders in the user's cache that are made once, whole or not at all."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def made_once(kind: str, name: str, make: Callable[[Path], Path]) -> Path:
    """The folder `name` among the cache's `kind` (XDG), made on the first call.

    Several processes may call at once: one makes it, the others wait. `make` gets a scratch folder beside it and returns the
    folder in there that takes the place.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spectune" / kind
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
