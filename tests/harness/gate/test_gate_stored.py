"""A stored baseline: read back as written, refused elsewhere, decided like a live one."""

import json
from pathlib import Path

import pytest

from backends.types import ConfigError
from harness.gate.stored import StoredBaseline, read_baseline, refuse_unequal
from tests.harness.gate.blocks import turn

ENVIRONMENT = {"host": {"cpu": "A", "cores": 2}, "gpu": [], "versions": {"torch": "2.13.0"}, "fingerprint": "sha256:1"}
WORKLOAD = {
    "trace": "demo.jsonl",
    "sha256": "0",
    "batch_sizes": [4],
    "requests_per_turn": 8,
    "max_output_tokens": 24,
    "seed": 0,
}


def stored() -> StoredBaseline:
    return StoredBaseline({"label": "off"}, WORKLOAD, ENVIRONMENT, "2026-01-31T12:00:00", ((turn(), turn(1.01)),) * 2)


def test_a_baseline_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    stored().write(tmp_path / "baseline.json")
    assert read_baseline(tmp_path / "baseline.json") == stored()


def test_an_equal_machine_and_workload_is_accepted() -> None:
    refuse_unequal(Path("baseline.json"), stored(), ENVIRONMENT, WORKLOAD)


def test_another_machine_is_refused_with_what_differs() -> None:
    other = {**ENVIRONMENT, "host": {"cpu": "B", "cores": 2}, "versions": {"torch": "2.14.0"}, "fingerprint": "sha256:2"}
    with pytest.raises(ConfigError) as caught:
        refuse_unequal(Path("baseline.json"), stored(), other, WORKLOAD)
    assert "environment.host.cpu was A, is B" in str(caught.value)
    assert "environment.versions.torch was 2.13.0, is 2.14.0" in str(caught.value)
    assert "sha256" not in str(caught.value)


def test_another_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"workload\.sha256 was 0, is 9"):
        refuse_unequal(Path("baseline.json"), stored(), ENVIRONMENT, {**WORKLOAD, "sha256": "9"})


@pytest.mark.parametrize("content", ["{}", "[]", "not json", json.dumps({"schema": 1, "blocks": [1]})])
def test_a_file_that_is_no_baseline_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="no baseline that --record wrote"):
        read_baseline(path)


def test_a_missing_file_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="write it with --record"):
        read_baseline(tmp_path / "none.json")
