"""Where the tests find SGLang, and how they start its real server on a CPU."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT_PYTHON = Path(__file__).parents[2] / ".venv-sglang" / "bin" / "python"
ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).with_name("sglang_cpu")),  # the kernel stand-in
    "HF_HUB_OFFLINE": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling two small functions takes longer than all the tokens of a test
}
CPU_BASE_ARGS = (
    "--device", "cpu", "--mem-fraction-static", "0.6", "--max-total-tokens", "8192", "--context-length", "2048",
    "--decode-log-interval", "4", "--skip-server-warmup",
)  # fmt: skip


def sglang_python() -> str:
    """The interpreter of SGLang's environment.

    Raises:
        RuntimeError: there is none.
    """
    python = Path(os.environ.get("SPECTUNE_SGLANG_PYTHON", DEFAULT_PYTHON))
    if not python.exists():
        raise RuntimeError(f"{python} is not there: `make test-engines` installs SGLang there")
    return str(python)
