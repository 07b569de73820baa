"""What is compared: one side is a server that already runs, or a quoted set of tune options that says how to start one."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from backends.registry import ADAPTERS
from backends.types import ConfigError, ServingConfig, WorkloadFacts
from harness.settings import parse_command, parse_pairs

_OPTIONS = (
    click.Option(["--backend"], default="reference"),
    click.Option(["--engine"], default=None, help="NAME=PYTHON_OR_COMMAND, or the command alone"),
    click.Option(["--base-args"], default=""),
    click.Option(["--model"], default="demo"),
    click.Option(["--variant", "--variants"], default="off"),
    click.Option(["--k"], type=click.IntRange(0), default=None),
    click.Option(["--topk"], type=click.IntRange(1), default=1),
    click.Option(["--tree-nodes"], type=click.IntRange(1), default=None),
    click.Option(["--draft"], default=None, help="VARIANT=ID_OR_PATH, or the checkpoint alone"),
    click.Option(["--quantization"], default="none"),
    click.Option(["--draft-quantization"], default="none"),
    click.Option(["--kv-cache-dtype"], default="auto"),
    click.Option(["--tensor-parallel"], type=click.IntRange(1), default=1),
    click.Option(["--max-num-seqs"], type=click.IntRange(1), default=64),
    click.Option(["--revision"], default=None, help="git revision of this repository (reference engine only)"),
)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two. `url` is set for a server that already runs; else `config`, `command` and `base_args` start one."""

    label: str
    backend: str
    url: str | None = None
    config: ServingConfig | None = None
    command: tuple[str, ...] = ()
    base_args: tuple[str, ...] = ()
    revision: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "backend": self.backend,
            "url": self.url,
            "config": self.config.to_dict() if self.config else None,
            "base_args": list(self.base_args),
            "revision": self.revision,
        }


def parse_side(option: str, text: str, *, endpoint_backend: str = "vllm") -> Side:
    """``http://...`` or quoted options -> a side. `endpoint_backend` says whose statistics page a URL has.

    Raises:
        ConfigError: an option is unknown or its value cannot be.
    """
    if text.startswith(("http://", "https://")):
        return Side(text.rstrip("/"), endpoint_backend, url=text.rstrip("/"))
    given = _read_options(option, text)
    backend, variant, draft = given["backend"], given["variant"], given["draft"]
    if backend not in ADAPTERS:
        raise ConfigError(f"{option}: unknown backend '{backend}'; choose from {', '.join(ADAPTERS)}")
    if given["revision"] and backend != "reference":
        raise ConfigError(f"{option}: --revision is for the reference engine; give another engine's version with --engine")
    k = given["k"] if given["k"] is not None else (0 if variant == "off" else 4)
    try:
        config = ServingConfig(
            backend=backend,
            model=_model(given["model"]),
            variant=variant,
            k=k,
            topk=given["topk"],
            num_draft_tokens=given["tree_nodes"],
            draft=_value_of(option, "--draft", draft, variant),
            draft_quantization=given["draft_quantization"],
            weight_quantization=given["quantization"],
            kv_cache_dtype=given["kv_cache_dtype"],
            tensor_parallel=given["tensor_parallel"],
            max_num_seqs=given["max_num_seqs"],
        )
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None
    engine = _value_of(option, "--engine", given["engine"], backend)
    return Side(
        label=text.strip() or "reference engine, off",
        backend=backend,
        config=config,
        command=parse_command(option, engine) if engine else ADAPTERS[backend].DEFAULT_COMMAND,
        base_args=parse_command(option, given["base_args"]),
        revision=given["revision"],
    )


def _read_options(option: str, text: str) -> Mapping[str, Any]:
    command = click.Command(option, params=list(_OPTIONS))
    try:
        return command.make_context(option, list(parse_command(option, text))).params
    except click.exceptions.Exit:
        raise ConfigError(f"{option}: give options such as '--variant ngram --k 4'") from None
    except click.ClickException as error:
        raise ConfigError(f"{option} '{text}': {error.format_message()}") from None


def _value_of(option: str, name: str, text: str | None, wanted: str) -> str | None:
    """``NAME=VALUE`` whose name must be `wanted`, or the value alone."""
    if text is None or not text.startswith(f"{wanted}="):
        return text
    return parse_pairs(f"{option} {name}", [text])[wanted]


def _model(model: str) -> str:
    if model != "demo":
        return model
    from backends.reference.demo_model import demo_model_dir

    return str(demo_model_dir())


def check_side(option: str, side: Side, facts: WorkloadFacts) -> None:
    """
    Raises:
        ConfigError: the engine cannot run this configuration on these requests.
    """
    reason = ADAPTERS[side.backend].supports(side.config, facts) if side.config else None
    if reason:
        raise ConfigError(f"{option}: {reason}")


def checkout(revision: str, folder: Path) -> Path:
    """A work tree of this repository at `revision` under `folder`.

    Raises:
        ConfigError: git does not know the revision.
    """
    here = Path(__file__).resolve().parents[2]
    target = folder.absolute() / f"revision-{revision.replace('/', '-')}"
    if target.exists():
        return target
    command = ["git", "-C", str(here), "worktree", "add", "--detach", "--force", str(target), revision]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"--revision {revision}: {last} ({shlex.join(command[:3])})")
    return target


def remove_checkout(tree: Path) -> None:
    here = Path(__file__).resolve().parents[2]
    subprocess.run(["git", "-C", str(here), "worktree", "remove", "--force", str(tree)], capture_output=True, check=False)
