"""Flags of an engine's command line, read and written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.types import ConfigError

_FLAG = re.compile(r"-{1,2}[A-Za-z]")


def is_python(command: tuple[str, ...]) -> bool:
    """Whether `command` is a bare Python interpreter, which needs a module to run."""
    return len(command) == 1 and re.fullmatch(r"python[0-9.]*", Path(command[0]).name) is not None


def flag(key: str) -> str:
    """``max_num_seqs`` or ``--max-num-seqs`` -> ``max-num-seqs``."""
    return key.lstrip("-").replace("_", "-")


def render(name: str, value: Any) -> list[str]:
    """One flag with its value: True ``--name``, False ``--no-name``, None nothing, a list its items, a mapping as JSON."""
    name = flag(name)
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, Mapping):
        return [f"--{name}", json.dumps(value, separators=(",", ":"))]
    if isinstance(value, (list, tuple)):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]


def parse(args: tuple[str, ...], aliases: Mapping[str, str]) -> dict[str, list[str]]:
    """Flags by their long name (short ones through `aliases`), each with the values that follow it.

    Raises:
        ConfigError: a value comes before any flag.
    """
    flags: dict[str, list[str]] = {}
    current: list[str] | None = None
    for part in args:
        if _FLAG.match(part):
            name, equals, value = part.partition("=")
            name = flag(name)
            current = flags.setdefault(aliases.get(name, name), [])
            current[:] = [value] if equals else []
        elif current is None:
            raise ConfigError(
                f"base arguments begin with '{part}', which is no flag: give the flags alone, the model with --model"
            )
        else:
            current.append(part)
    return flags


def base_flags(base_args: tuple[str, ...], aliases: Mapping[str, str]) -> dict[str, list[str]]:
    """The user's own flags by long name.

    Raises:
        ConfigError: a positional argument, a key, or remote code among them.
    """
    flags = parse(base_args, aliases)
    if "api-key" in flags:
        raise ConfigError(
            "--base-args holds --api-key, and a command line can be read by everyone on the machine: "
            "put the key into an environment variable that the engine reads and name it with --api-key-env"
        )
    if "trust-remote-code" in flags:
        raise ConfigError("--base-args holds --trust-remote-code: remote code of a checkpoint is never run")
    return flags


def integer(name: str, values: list[str]) -> int:
    """The one integer that `name` was given.

    Raises:
        ConfigError: it is none.
    """
    try:
        return int(values[0])
    except (IndexError, ValueError):
        raise ConfigError(f"--{name} needs a whole number, not '{' '.join(values)}'") from None
