"""A launch as text for a shell, a Dockerfile and Kubernetes says the same as the launch itself."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import yaml
from hypothesis import given
from hypothesis import strategies as st

from backends.deploy import FOLDER, as_dockerfile, as_kubernetes, as_shell
from backends.types import Launch

SETTINGS = '{"1": {"candidate_steps": [1, 3]}}\n'
LAUNCH = Launch(
    argv=(
        "serve",
        "org/target",
        "--host",
        "127.0.0.1",
        "--port",
        "8123",
        "--adaptive",
        "{folder}/adaptive.json",
        "--spec",
        '{"k": 3}',
    ),
    env={"MODE": "it's on", "WHERE": "{folder}"},
    files={"adaptive.json": SETTINGS},
    ready_timeout_s=600,
)
PLAIN = Launch(argv=("serve", "org/target", "--port", "8123"))


def run_shell(text: str, folder: Path) -> list[str]:
    """Arguments and MODE that the script's program gets: a program `serve` that prints them stands first on the path."""
    program = folder / "serve"
    program.write_text('#!/bin/sh\nprintf "%s\\0" "$MODE" "$@"\n')
    program.chmod(0o755)
    done = subprocess.run(
        ["sh", "-eu"], input=f"PATH={folder}:$PATH MODE=\n{text}", capture_output=True, text=True, cwd=folder, check=True
    )
    return done.stdout.split("\0")[:-1]


def test_a_shell_starts_the_same_process_and_writes_its_files(tmp_path: Path) -> None:
    mode, *argv = run_shell(as_shell(LAUNCH), tmp_path)
    assert mode == "it's on"
    assert argv == [part.replace("{folder}", str(tmp_path / "spectune")) for part in LAUNCH.argv[1:]]
    assert (tmp_path / "spectune" / "adaptive.json").read_text() == SETTINGS


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0\r{}"), max_size=20), max_size=4))
def test_any_argument_survives_the_shell(arguments: list[str]) -> None:
    text = as_shell(Launch(argv=("printf", "%s\\0", *arguments)))
    done = subprocess.run(["sh", "-eu", "-c", text], capture_output=True, check=True)
    expected = arguments or [""]  # printf without arguments prints its format once
    assert done.stdout.decode() == "".join(argument + "\0" for argument in expected)


def test_a_launch_without_files_is_one_line_of_shell() -> None:
    assert as_shell(PLAIN) == "serve org/target --port 8123\n"


def test_a_dockerfile_holds_command_variables_and_files() -> None:
    text = as_dockerfile(LAUNCH, image="engine:1.2.3")
    lines = text.splitlines()
    assert lines[1] == "FROM engine:1.2.3"
    assert f'ENV WHERE="{FOLDER}"' in lines
    assert "EXPOSE 8123" in lines
    assert f'COPY <<"EOF" {FOLDER}/adaptive.json' in lines
    assert SETTINGS.strip() in lines
    argv = json.loads(lines[-1].removeprefix("ENTRYPOINT "))
    assert argv == [
        "serve", "org/target", "--host", "0.0.0.0", "--port", "8123", "--adaptive", f"{FOLDER}/adaptive.json", "--spec", '{"k": 3}',
    ]  # fmt: skip


def test_a_file_that_holds_the_end_mark_gets_another_one() -> None:
    text = as_dockerfile(Launch(argv=("serve",), files={"a": "x\nEOF\ny\n"}))
    assert 'COPY <<"EOF_" /etc/spectune/a\nx\nEOF\ny\nEOF_\n' in text


def test_kubernetes_gets_files_as_a_config_map_mounted_where_the_command_looks() -> None:
    config_map, pod = yaml.safe_load_all(as_kubernetes(LAUNCH, image="engine:1"))
    assert config_map["data"] == {"adaptive.json": SETTINGS}
    (container,) = pod["containers"]
    assert container["command"][2:4] == ["--host", "0.0.0.0"]
    assert container["env"] == [{"name": "MODE", "value": "it's on"}, {"name": "WHERE", "value": FOLDER}]
    assert container["volumeMounts"][0]["mountPath"] == FOLDER
    assert pod["volumes"][0]["configMap"]["name"] == config_map["metadata"]["name"]
    assert container["readinessProbe"]["failureThreshold"] * container["readinessProbe"]["periodSeconds"] == 600


def test_kubernetes_without_files_is_a_container_alone() -> None:
    documents = list(yaml.safe_load_all(as_kubernetes(PLAIN)))
    assert len(documents) == 1
    assert "volumeMounts" not in documents[0]["containers"][0]


def test_paths_of_the_machine_that_measured_stay_out_of_containers() -> None:
    launch = Launch(
        argv=("/home/me/.venv/bin/python3.11", "-m", "engine", "--host", "127.0.0.1"), env={"PYTHONPATH": "/home/me", "A": "1"}
    )
    (pod,) = yaml.safe_load_all(as_kubernetes(launch))
    assert pod["containers"][0]["command"] == ["python3", "-m", "engine", "--host", "0.0.0.0"]
    assert pod["containers"][0]["env"] == [{"name": "A", "value": "1"}]
    assert "/home/me" not in as_dockerfile(launch)
    assert "/home/me/.venv/bin/python3.11 -m engine" in as_shell(launch)
