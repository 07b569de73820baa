"""SGLang's own argument parser takes every command line of the adapter as it is: what was asked is what it resolves to.

Needs SGLang 0.5.23 in the environment whose interpreter SPECTUNE_SGLANG_PYTHON names (`tests/engines/install_sglang.sh`).
With SPECTUNE_RECORD=1 the answers are written to `tests/data/sglang/resolved.jsonl`, which the ordinary tests read.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from backends import sglang
from backends.types import ServingConfig
from tests.backends.sglang_space import MODELS, arguments, rewritten, sampled
from tests.engines.sglang_checkpoints import write_checkpoints
from tests.engines.sglang_server import ENVIRONMENT, sglang_python

pytestmark = pytest.mark.engines
RECORD = Path(__file__).parents[1] / "data" / "sglang" / "resolved.jsonl"

# What SGLang itself changes with speculation on, beyond the speculative settings: its share of memory for the KV cache, and the
# batch sizes for which it captures graphs. Both are reported with a measurement, not hidden.
CHANGES_WITH_SPECULATION = {"mem_fraction_static", "cuda_graph_config"}


def resolve(folder: Path, device: str, argument_lists: list[list[str]]) -> list[dict[str, Any]]:
    """SGLang's answers, in order; checkpoint folders and schedule files lie below `folder`."""
    argument_lists = [[part.replace(MODELS, str(folder)) for part in argv] for argv in argument_lists]
    done = subprocess.run(
        [sglang_python(), str(Path(__file__).with_name("sglang_resolve.py"))],
        input=json.dumps(argument_lists),
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT, "SGLANG_USE_CPU_ENGINE": str(int(device == "cpu"))},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout.splitlines()[-1].replace(str(folder), MODELS))
    assert isinstance(answers, list)
    return answers


def command_line(folder: Path, config: ServingConfig, device: str) -> list[str]:
    """The arguments of `config`, with the schedule file it brings written out."""
    argv = arguments(config, device)
    launch_folder = folder / str(abs(hash(json.dumps(config.to_dict(), sort_keys=True))))
    if any("{folder}" in part for part in argv):
        launch_folder.mkdir(exist_ok=True)
        (launch_folder / sglang.ADAPTIVE_FILE).write_text(json.dumps(sglang.adaptive_schedule(config)))
    return [part.replace("{folder}", str(launch_folder)) for part in argv]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_command_line_resolves_to_what_it_asks_for(device: str, tmp_path: Path) -> None:
    write_checkpoints(tmp_path)
    configs = sampled(device)
    lines = [command_line(tmp_path, config, device) for config in configs]
    off_lines = [command_line(tmp_path, config.off(), device) for config in configs]
    answers = resolve(tmp_path, device, lines + off_lines)
    errors = {configs[i % len(configs)].label(): answer["error"] for i, answer in enumerate(answers) if "error" in answer}
    assert errors == {}
    resolved = [answer["resolved"] for answer in answers]
    changed: set[str] = set()
    for config, argv, on, off in zip(configs, lines, resolved, resolved[len(configs) :], strict=False):
        asked = [part.replace(str(tmp_path), MODELS) for part in argv]
        assert rewritten(asked, on) == {}, config.label()
        changed |= {name for name in on if on[name] != off[name] and not name.startswith("speculative_")}
    changed.discard("random_seed")  # drawn anew at each start
    assert changed <= CHANGES_WITH_SPECULATION
    assert len(configs) >= (120 if device == "cuda" else 90)
    if os.environ.get("SPECTUNE_RECORD"):
        _record(device, configs, resolved)


def _record(device: str, configs: list[ServingConfig], resolved: list[dict[str, Any]]) -> None:
    from tests.backends.sglang_space import asked

    others = []
    if RECORD.exists():
        others = [line for line in RECORD.read_text().splitlines() if json.loads(line)["device"] != device]
    lines = []
    for config, answer in zip(configs, resolved, strict=False):
        names = asked(arguments(config, device))
        kept = {name: answer[name] for name in names if name != "speculative_adaptive_config"}
        lines.append(json.dumps({"device": device, "config": config.to_dict(), "resolved": kept}, separators=(",", ":")))
    RECORD.write_text("\n".join([*others, *lines]) + "\n")
