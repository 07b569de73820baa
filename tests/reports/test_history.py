"""The trend page over stored gates: marks where a level changed, no mark in noise, machines apart."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.gate.outputs import Report, write_outputs
from harness.gate.session import run_session
from harness.gate.types import Rules
from reports import ReportError, render_history
from reports.trend import change_points
from tests.harness.gate.blocks import ListSource, blocks


def store(folder: Path, day: int, *, slow: float = 1.0, machine: str = "sha256:aa", label: str = "--variant ngram") -> None:
    """One gate of an engine against itself, `slow` times slower than on the first day."""
    found = [replace(b, baseline=b.candidate) for b in blocks(16, slow=slow, noise=0.003, seed=day)]
    run = run_session(ListSource(found), Rules(), 160.0)
    side = {"label": label, "backend": "reference"}
    report = Report(run, Rules(), side, side, {"fingerprint": machine}, f"2026-01-{day:02d}T12:00:00", 160.0, "turns")
    write_outputs(report, folder / f"gate-{day}")


def test_a_change_of_level_is_marked_at_its_gate_and_nowhere_else(tmp_path: Path) -> None:
    for day in range(1, 13):
        store(tmp_path, day, slow=1.08 if day >= 8 else 1.0)
    page = render_history(tmp_path).read_text()
    assert "step time changed by +8." in page
    assert "E2E p50 changed by +8." in page
    assert page.count("with the gate of 2026-01-08T12:00:00") == page.count("changed by") > 0
    assert "tau changed" not in page


def test_gates_of_two_machines_are_not_joined(tmp_path: Path) -> None:
    for day in range(1, 13):
        store(tmp_path, day, slow=1.3 if day % 2 else 1.0, machine=f"sha256:{day % 2}")
    page = render_history(tmp_path).read_text()
    assert page.count("6 gates</h2>") == 2
    assert "changed by" not in page


def test_text_of_a_gate_is_inert(tmp_path: Path) -> None:
    store(tmp_path, 1, label="--base-args '<script>alert(1)</script>'")
    page = render_history(tmp_path).read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_a_folder_without_gates_and_a_broken_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"no gate\.json"):
        render_history(tmp_path)
    (tmp_path / "gate.json").write_text("{}")
    with pytest.raises(ReportError, match=r"gate\.json: not a gate's result"):
        render_history(tmp_path)


def test_noise_alone_is_hardly_ever_marked_and_a_step_of_four_sigma_is() -> None:
    rng = np.random.default_rng(1)
    marked = sum(bool(change_points(np.exp(rng.normal(0, 0.02, 12)))) for _ in range(200))
    assert marked <= 14  # 3 % and what chance adds to it
    found = 0
    for _ in range(100):
        values = np.exp(rng.normal(0, 0.02, 20))
        values[10:] *= 1.08
        found += any(abs(at - 10) <= 1 for at in change_points(values))
    assert found >= 93
