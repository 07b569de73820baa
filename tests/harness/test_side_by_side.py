"""Servers that run side by side to be measured in turn: where they fit, and that nothing is left of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from harness import bench
from harness.bench import Setup
from harness.slots import Here, Slot
from tests.harness.simulated_lab import SimulatedLab, engines_of, is_supervisor


def here(setup: Setup) -> list[Slot]:
    return [Here(setup)]


def on_a_gpu(setup: Setup) -> list[Slot]:
    return [Here(replace(setup, gpus=1))]


def engines(folder: Path) -> set[int]:
    return {process.pid for process in engines_of(folder) if not is_supervisor(process)}


def test_loads_take_turns_on_servers_that_are_started_once_and_all_ended_by_another(tmp_path: Path) -> None:
    made = SimulatedLab(tmp_path, here)
    wanted = [made.wanted((k, batch))[0] for batch in (1, 2) for k in (0, 2)]
    with made.lab as lab:
        lab.run(*wanted[0])
        assert lab.side_by_side(wanted)  # the first is measured: off is wanted all the same, at the other batch size
        both = engines(tmp_path)
        assert len(both) == 2
        trials = [lab.run(*one) for one in wanted]
        assert engines(tmp_path) == both
        assert [trial.config.k for trial in trials] == [0, 2, 0, 2]
        assert all(trial.measured for trial in trials)
        alone_s = trials[2].cost["seconds"]
        assert trials[1].cost["seconds"] > alone_s  # the starts are charged to the first load on them
        assert not lab.side_by_side(wanted)  # nothing is left to measure
        lab.run(*made.wanted((1, 1))[0])
        assert len(engines(tmp_path)) == 1
    _, alive = psutil.wait_procs(engines_of(tmp_path), timeout=10)
    assert not alive


@pytest.mark.parametrize("limit", ["ROOM", "IDLE_SHARE"])
def test_servers_without_memory_or_idle_cores_for_another_one_run_one_at_a_time(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, limit, {"ROOM": 1e9, "IDLE_SHARE": -1.0}[limit])
    made = SimulatedLab(tmp_path, here)
    wanted = [made.wanted((k, 1))[0] for k in (0, 2)]
    with made.lab as lab:
        assert not lab.side_by_side(wanted)
        assert len(engines(tmp_path)) == 1  # of the first, which is measured next
        assert all(lab.run(*one).measured for one in wanted)


def test_engines_on_a_gpu_are_not_started_side_by_side(tmp_path: Path) -> None:
    made = SimulatedLab(tmp_path, on_a_gpu)
    with made.lab as lab:
        assert not lab.side_by_side([made.wanted((k, 1))[0] for k in (0, 2)])
        assert engines(tmp_path) == set()
