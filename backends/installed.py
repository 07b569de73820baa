"""Which version of an engine a command would start, without starting it."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

PROBE_TIMEOUT_S = 20.0


def parse_version(text: str) -> tuple[int, ...] | None:
    """``0.5.3.post1+cpu`` -> (0, 5, 3); None where `text` begins with no version."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part) for part in match.groups() if part) if match else None


def version_text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@lru_cache(maxsize=16)
def installed_version(command: tuple[str, ...], *distributions: str) -> tuple[int, ...] | None:
    """Version of the first of `distributions` installed for the interpreter that `command` starts with or that lies beside its program.

    None where that cannot be told: a container, a remote shell, a program that is not there.
    """
    python = _python_of(command[0])
    if python is None:
        return None
    code = (
        "import importlib.metadata as m\n"
        f"for name in {distributions!r}:\n"
        "    try: print(m.version(name)); break\n"
        "    except m.PackageNotFoundError: pass"
    )
    try:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_version(done.stdout.strip())


def _python_of(program: str) -> str | None:
    """The interpreter itself, or the one in the same folder where `program` is a script of its environment."""
    found = shutil.which(program)
    if found is None:
        return None
    if re.fullmatch(r"python[0-9.]*", Path(found).name):
        return found
    try:
        with Path(found).open("rb") as program_file:
            is_script = b"python" in program_file.readline(200)
    except OSError:
        return None
    beside = Path(found).with_name("python")
    return str(beside) if is_script and beside.exists() else None
