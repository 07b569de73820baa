"""Main jobs that tests run for their reports, which stay in ``runs/tests/NAME`` until the test runs again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.result_schema import validate

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "workloads" / "samples" / "demo.jsonl"


def tune(name: str, trace: Path, *options: str, env: Mapping[str, str] = {}, timeout_s: float = 3000) -> dict[str, Any]:
    """Run the main job as a user does; its checked result, beside which the report lies."""
    out = ROOT / "runs" / "tests" / name
    shutil.rmtree(out, ignore_errors=True)
    argv = [sys.executable, str(ROOT / "tune.py"), "--trace", str(trace), "--out", str(out), *options]
    done = subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (out / "report.html").stat().st_size > 20_000
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    validate(result)
    return result


def confirmed_speedups(result: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The finalist's speed-up by batch size, from the last round of the confirmation."""
    (decision,) = result["decisions"]
    (group,) = decision["by_engine"]
    trials = [
        t for t in result["trials"] if t["stage"].startswith("confirm") and t["config"] == group["config"] and t["speedup"]
    ]
    return {t["load"]["concurrency"]: t["speedup"] for t in trials}
