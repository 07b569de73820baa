from __future__ import annotations

from pathlib import Path

import pytest
from run_builder import RunSpec, build_run
from run_sections import HOSTILE

from reports import render

SPECS = {
    "plain": RunSpec(requests=60),
    "hostile": RunSpec(
        engines=("reference", "vllm"), traces=("prod.jsonl", HOSTILE), k=(1, 3), batch_sizes=(1, 16), requests=24, chunks=False
    ),
    "failed": RunSpec(requests=12, all_fail=True),
}


@pytest.fixture(scope="session")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run directories with their reports, by name."""
    root = tmp_path_factory.mktemp("runs")
    folders = {name: build_run(root / name, spec) for name, spec in SPECS.items()}
    render(list(folders.values()))
    return folders
