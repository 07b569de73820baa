"""Loads on the nodes of a Ray cluster (two nodes on this host): one is killed while it measures."""

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from backends.types import ConfigError
from harness.bench import Setup
from harness.site import Site
from harness.slots import Slot
from tests.harness.simulated_lab import SimulatedLab, engines_of, wait_for_engines

# What else this host does is neither a reason to kill workers nor one to let them wait.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0", "RAY_worker_niceness": "0"}

import ray
from ray.cluster_utils import Cluster

from harness import ray_slots


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_load_is_measured_once_although_a_node_is_killed_and_no_engine_is_left(cluster: Cluster, tmp_path: Path) -> None:
    notes: list[str] = []

    def slots(setup: Setup) -> list[Slot]:
        there = replace(setup, settings=replace(setup.settings, executor="ray", ray_address=cluster.address))
        return ray_slots.ray_slots(there, notes.append)[0]

    made = SimulatedLab(tmp_path, slots)
    killed: list[psutil.Process] = []

    def kill_a_node() -> None:
        killed.extend(wait_for_engines(tmp_path, 2))
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)

    killer = threading.Thread(target=kill_a_node)
    killer.start()
    cells = [[(1, 1), (1, 2)], [(2, 1), (2, 2)], [(3, 1)]]
    with made.lab as lab:
        assert len(lab.slots) == 2
        done = list(lab.ahead(cells, made.wanted))
        left = [slot.name for slot in lab.slots]
        again = [lab.run(*wanted) for cell in done for wanted in made.wanted(cell)]
    killer.join()
    assert sorted(done) == [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)]
    assert [(trial.state, trial.reason) for trial in made.store.trials] == [("COMPLETE", None)] * 5
    assert sorted(trial.number for trial in again) == [0, 1, 2, 3, 4]  # found, not measured again
    assert len(left) == 1  # the other's node is gone
    assert notes == [f"slots: {notes[0].removeprefix('slots: ')}"]
    assert len(killed) >= 6
    _, alive = psutil.wait_procs([*killed, *engines_of(tmp_path)], timeout=10)
    assert not alive


def site(**changes: Any) -> Site:
    host = {"cpu": "A", "threads": 8, "kernel": "6.1", **changes}
    return Site({"host": host, "gpu": [], "versions": {"torch": "2.13"}}, {"model": "abc"}, {"vllm": "0.32"})


def test_unequal_nodes_are_left_out_and_named() -> None:
    notes: list[str] = []
    a, b, c = (SimpleNamespace(name=name, close=lambda: notes.append("closed")) for name in "abc")
    chosen, found = ray_slots.equal_sites([(a, site()), (b, site(threads=16)), (c, site())], notes.append)  # type: ignore[list-item]
    assert chosen == [a, c]
    assert found == site()
    assert notes == ["not measured on b: it differs from the others: threads: 16 instead of 8", "closed"]


def test_a_checkpoint_of_another_content_on_the_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match="model is not the same on the nodes as here"):
        ray_slots._require_same_checkpoints(site(), replace(site(), files={"model": "other"}))


@pytest.mark.parametrize(
    ("resources", "gpus", "slots"),
    [
        ({"CPU": 64, "GPU": 8}, True, [{"num_gpus": 2, "num_cpus": 0}] * 4),
        ({"CPU": 64, "GPU": 1}, True, []),
        ({"CPU": 64}, True, []),
        ({"CPU": 64}, False, [{"num_cpus": 64}]),
        ({}, False, []),
    ],
)
def test_a_node_has_a_slot_for_each_tensor_parallel_gpus(resources: dict[str, float], gpus: bool, slots: list[Any]) -> None:
    assert ray_slots.held_on({"Resources": resources}, 2, gpus=gpus) == slots
