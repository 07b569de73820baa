"""The composite action and the CI examples hold to the schemas of their systems."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ("vendor.github-actions", "action.yml"),
        ("vendor.github-workflows", "docs/ci/github-actions.yml"),
        ("vendor.gitlab-ci", "docs/ci/gitlab-ci.yml"),
    ],
)
def test_file_is_valid(schema: str, path: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(ROOT / path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def action_script() -> str:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    script: str = action["runs"]["steps"][0]["run"]
    return script


@pytest.mark.parametrize(
    ("code", "inconclusive", "expected", "outcome"),
    [(0, "pass", 0, "pass"), (3, "pass", 3, "regression"), (4, "pass", 0, "inconclusive"), (4, "fail", 4, "inconclusive")],
)
def test_the_action_turns_exit_codes_into_an_outcome(
    tmp_path: Path, code: int, inconclusive: str, expected: int, outcome: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{tmp_path}/argv"\nexit {code}\n')
    python.chmod(0o755)
    env = {"BASELINE": "--variant ngram --k 4", "CANDIDATE": "$(touch hacked)", "PROFILE": "pr", "BUDGET": "5m", "TRACE": ""}
    env |= {"INCONCLUSIVE": inconclusive, "OUT": "out", "PYTHON": str(python), "TUNE": "tune.py", "PATH": "/usr/bin:/bin"}
    env |= {"GITHUB_OUTPUT": str(tmp_path / "output"), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
    done = subprocess.run(["bash", "-eo", "pipefail", "-c", action_script()], env=env, cwd=tmp_path, check=False)
    assert done.returncode == expected
    assert (tmp_path / "output").read_text() == f"outcome={outcome}\n"
    argv = (tmp_path / "argv").read_text().splitlines()
    assert argv[:4] == ["tune.py", "gate", "--baseline", "--variant ngram --k 4"]
    assert not (tmp_path / "hacked").exists()
