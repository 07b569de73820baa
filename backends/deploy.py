"""A `Launch` as text to paste into a deployment: a shell, a Dockerfile, or a container of a Kubernetes pod.

The server that was measured listened on 127.0.0.1; in a container it must listen on every address of the container's own
network, so the two container forms say ``0.0.0.0``, and the container alone decides who reaches it. Paths of the machine that
measured mean nothing there: a program loses its folder, an interpreter is ``python3``, and PYTHONPATH is left out. Files of the
launch go to `FOLDER`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import yaml

from backends.process import FOLDER as PLACEHOLDER
from backends.types import Launch

FOLDER = "/etc/spectune"
SHELL_FOLDER = "$PWD/spectune"
IMAGE = "ENGINE_IMAGE"  # to be replaced by the image of the engine's version that was measured
PORT = 8000


def as_shell(launch: Launch) -> str:
    """A script for a POSIX shell that writes the launch's files below the current folder and starts the engine."""
    lines = []
    if launch.files:
        lines.append(f'mkdir -p "{SHELL_FOLDER}"')
    for name, content in launch.files.items():
        mark = _heredoc_mark(content)
        lines += [f"cat > \"{SHELL_FOLDER}\"/{shlex.quote(name)} <<'{mark}'", content.rstrip("\n"), mark]
    command = [_shell_word(part) for part in launch.argv]
    variables = [f"{name}={_shell_word(value)}" for name, value in launch.env.items()]
    lines.append(" ".join([*variables, *command]))
    return "\n".join(lines) + "\n"


def as_dockerfile(launch: Launch, image: str = IMAGE) -> str:
    """A Dockerfile on top of the engine's `image`. Files are written with heredocs, which BuildKit understands."""
    lines = ["# syntax=docker/dockerfile:1", f"FROM {image}"]
    lines += [f"ENV {name}={json.dumps(value)}" for name, value in _container_env(launch).items()]
    for name, content in launch.files.items():
        mark = _heredoc_mark(content)
        lines += [f'COPY <<"{mark}" {FOLDER}/{name}', content.rstrip("\n"), mark]
    lines += [f"EXPOSE {_port(launch)}", f"ENTRYPOINT {json.dumps(_container_argv(launch))}"]
    return "\n".join(lines) + "\n"


def as_kubernetes(launch: Launch, image: str = IMAGE, name: str = "llm-server") -> str:
    """A container spec (an item of `spec.containers`), after a ConfigMap and its volume where the launch has files."""
    container: dict[str, Any] = {
        "name": name,
        "image": image,
        "command": _container_argv(launch),
        "ports": [{"containerPort": _port(launch)}],
        "readinessProbe": {
            "httpGet": {"path": "/health", "port": _port(launch)},
            "periodSeconds": 5,
            "failureThreshold": int(launch.ready_timeout_s // 5),
        },
    }
    if env := _container_env(launch):
        container["env"] = [{"name": key, "value": value} for key, value in env.items()]
    if not launch.files:
        return _yaml({"containers": [container]})
    container["volumeMounts"] = [{"name": f"{name}-files", "mountPath": FOLDER, "readOnly": True}]
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-files"},
        "data": dict(launch.files),
    }
    pod = {"containers": [container], "volumes": [{"name": f"{name}-files", "configMap": {"name": f"{name}-files"}}]}
    return _yaml(config_map) + "---\n" + _yaml(pod)


def _container_argv(launch: Launch) -> list[str]:
    program, *rest = (part.replace(PLACEHOLDER, FOLDER) for part in launch.argv)
    if "/" in program:
        program = PurePosixPath(program).name
        program = "python3" if program.startswith("python") else program
    argv = [program, *rest]
    return ["0.0.0.0" if before == "--host" else part for before, part in zip(["", *argv], argv, strict=False)]


def _container_env(launch: Launch) -> dict[str, str]:
    return {name: value.replace(PLACEHOLDER, FOLDER) for name, value in launch.env.items() if name != "PYTHONPATH"}


def _port(launch: Launch) -> int:
    for before, part in zip(launch.argv, launch.argv[1:], strict=False):
        if before == "--port" and part.isdigit():
            return int(part)
    return PORT


def _shell_word(text: str) -> str:
    """Quoted for a shell; the placeholder of the launch's folder becomes a variable that the shell fills in."""
    pieces = [shlex.quote(piece) if piece else "" for piece in text.split(PLACEHOLDER)]
    return f'"{SHELL_FOLDER}"'.join(pieces) or "''"


def _heredoc_mark(content: str) -> str:
    mark = "EOF"
    while mark in content.splitlines():
        mark += "_"
    return mark


def _yaml(document: Mapping[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=140)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, so that a settings file stays readable inside a ConfigMap."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)
