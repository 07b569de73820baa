"""Triton brings its own assembler, so that the kernels compile for GPUs on any machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SMALLEST_SHARED_MEMORY = 99 * 1024  # that one block can have, of compute capabilities 8.9 and 9.0: that of 8.9


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kernels_compile_and_fit_in_shared_memory(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[4]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, script], check=False, env=environment, cwd=root, capture_output=True, text=True, timeout=880
    )
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert len(sizes) == 32
    assert {name: size for name, size in sizes.items() if size > SMALLEST_SHARED_MEMORY} == {}
