"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write-then-rename: a reader never sees half of it, and a killed writer leaves what was there. The folder is made.

    Several processes may write the same file: each has a scratch file of its own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.replace(path)
