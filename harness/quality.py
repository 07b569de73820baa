"""What a quantization that the user does not run costs in quality, measured by the reference engine in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.types import BackendError
from workloads.types import Request

PROMPTS = 16
MAX_TOKENS = 32


def measure_quality(
    model: str, requests: Sequence[Request], *, baseline: str, others: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """``{quantization: {"greedy_agreement": share, "mean_kl": nats}}`` against `baseline`, teacher-forced on the trace's prompts.

    Raises:
        BackendError: the measurement failed.
    """
    rows = [_row(request) for request in requests if request.messages or request.prompt][:PROMPTS]
    if not rows or not others:
        return {}
    command = [sys.executable, "-m", "backends.reference.quality", "--model", model, "--baseline", baseline]
    options = ["--quantization", ",".join(others), "--max-tokens", str(MAX_TOKENS)]
    result = subprocess.run(
        [*command, *options],
        input="".join(json.dumps(row) + "\n" for row in rows),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
        check=False,
    )
    if result.returncode:
        last = result.stderr.strip().rpartition("\n")[2]
        raise BackendError(f"the quality of {', '.join(others)} could not be measured: {last}")
    found: dict[str, dict[str, Any]] = json.loads(result.stdout)
    return found


def _row(request: Request) -> Mapping[str, Any]:
    return {"messages": list(request.messages)} if request.messages else {"prompt": request.prompt}
