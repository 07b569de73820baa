"""What a quantization that the user does not run, of weights or KV cache, costs in quality: measured by the reference engine in a
process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.types import BackendError, ServingConfig
from workloads.types import Request

PROMPTS = 16
MAX_TOKENS = 32


def quality_key(config: ServingConfig) -> str:
    """Configurations with equal keys have the same quality: ``int4``, or ``none, int8 KV cache``."""
    weights, cache = config.weight_quantization, config.kv_cache_dtype
    return weights if cache == "auto" else f"{weights}, {cache} KV cache"


def measure_quality(
    requests: Sequence[Request], *, baseline: ServingConfig, others: Sequence[ServingConfig]
) -> dict[str, dict[str, Any]]:
    """``{quality key: {"greedy_agreement": share, "mean_kl": nats}}`` against `baseline`, teacher-forced on the trace's prompts.

    Raises:
        BackendError: the measurement failed.
    """
    rows = [_row(request) for request in requests if request.messages or request.prompt][:PROMPTS]
    if not rows or not others:
        return {}
    command = [sys.executable, "-m", "backends.reference.quality", "--model", baseline.model]
    options = ["--max-tokens", str(MAX_TOKENS), "--baseline", baseline.weight_quantization, baseline.kv_cache_dtype]
    for other in others:
        options += ["--other", other.weight_quantization, other.kv_cache_dtype]
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
        raise BackendError(f"the quality of {'; '.join(map(quality_key, others))} could not be measured: {last}")
    return dict(zip(map(quality_key, others), json.loads(result.stdout), strict=True))


def _row(request: Request) -> Mapping[str, Any]:
    return {"messages": list(request.messages)} if request.messages else {"prompt": request.prompt}
