"""Slots on the nodes of a Ray cluster: on each node as many as its GPUs carry, or one where the cluster has no GPUs.

Each slot is an actor that holds its GPUs (`num_gpus`) on one node. Ray says which GPUs it sees, ships this checkout to it, and ends
it when the coordinator dies; its engine is supervised on its node and ends with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from backends.types import ConfigError
from harness.bench import Bench, Setup
from harness.settings import RunSettings
from harness.site import Site, site_of
from harness.slots import ENGINE_ENDS_S, Slot

try:
    import ray
    from ray.exceptions import ActorUnschedulableError, GetTimeoutError, ObjectLostError, RayActorError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError:
    raise ConfigError("--executor ray: Ray is not installed; install the extra 'ray'") from None

CHECKOUT = Path(__file__).resolve().parents[1]
NOT_SHIPPED = (".git", ".venv*", "runs", "build", "tests", "docs", "benchmarks")
START_S = 300.0
"""How long a node may take to get the code and start a worker, and how long GPUs that others hold are waited for."""
THREADS = "OMP_NUM_THREADS"  # Ray sets it by the CPUs that an actor asks for; engines must find it as they do without Ray


class Worker:
    """A bench in an actor."""

    def __init__(self, setup: Setup, threads: str | None) -> None:
        os.environ.pop(THREADS, None)
        if threads is not None:
            os.environ[THREADS] = threads
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)  # Ray makes its workers, and so their engines, wait for all else (nice 15)
        self._settings = setup.settings
        self._bench = Bench(replace(setup, folder=Path(tempfile.mkdtemp(prefix="spectune-"))))

    def site(self) -> Site:
        return site_of(self._settings)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._bench, method)(*args)


class RaySlot:
    lost = (RayActorError, ActorUnschedulableError, ObjectLostError)  # and no error that the worker's own code raised

    def __init__(self, setup: Setup, node: Mapping[str, Any], resources: Mapping[str, float]) -> None:
        self.name = f"{node['NodeManagerHostname']} ({node['NodeID'][:6]})"
        self._setup, self._node, self._resources = setup, node["NodeID"], dict(resources)
        self._open()

    def call(self, method: str, *args: Any) -> Future[Any]:
        found: Future[Any] = self._actor.call.remote(method, *args).future()
        return found

    def renew(self) -> bool:
        self.close()
        time.sleep(ENGINE_ENDS_S)
        self._open()
        try:
            ray.get(self.site, timeout=START_S)
        except RayError:  # its node is gone
            return False
        return True

    def close(self) -> None:
        ray.kill(self._actor)

    def _open(self) -> None:
        there = NodeAffinitySchedulingStrategy(self._node, soft=False)
        actor: Any = ray.remote(Worker).options(scheduling_strategy=there, max_restarts=0, **self._resources)
        self._actor = actor.remote(self._setup, os.environ.get(THREADS))
        self.site = self._actor.site.remote()


def ray_slots(setup: Setup, note: Callable[[str], None]) -> tuple[list[Slot], Site]:
    """The slots on the largest group of equal nodes: times measured on unequal ones do not compare, so others are left out, and named.

    Raises:
        ConfigError: no cluster at the address, no node with enough GPUs that are free, or none that can run the project.
    """
    settings = setup.settings
    connect(settings)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    gpus = any(node["Resources"].get("GPU") for node in nodes)
    setup = replace(setup, gpus=settings.tensor_parallel if gpus else 0)
    slots = [RaySlot(setup, node, held) for node in nodes for held in held_on(node, settings.tensor_parallel, gpus=gpus)]
    if not slots:
        raise ConfigError(f"--executor ray: no node of the cluster has {settings.tensor_parallel} GPUs (--tensor-parallel)")
    ray.wait([slot.site for slot in slots], num_returns=len(slots), timeout=START_S)
    equal, site = equal_sites(_sites(slots, note), note)
    _require_same_checkpoints(site, site_of(settings))
    note(f"slots: {', '.join(slot.name for slot in equal)}")
    return list(equal), site


def connect(settings: RunSettings) -> None:
    """Join the cluster, unless this process has."""
    if ray.is_initialized():
        return
    address = settings.ray_address or "auto"
    try:
        ray.init(
            address=address,
            runtime_env={"working_dir": str(CHECKOUT), "excludes": list(NOT_SHIPPED)},
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--ray-address {address}: {reason}; start a cluster with `ray start --head`, or name one") from None


def held_on(node: Mapping[str, Any], tensor_parallel: int, *, gpus: bool) -> list[dict[str, float]]:
    """What each slot of a node holds. Without GPUs one slot has all CPUs: two engines would take them from each other."""
    if gpus:
        count = int(node["Resources"].get("GPU", 0)) // tensor_parallel
        return [{"num_gpus": tensor_parallel, "num_cpus": 0}] * count
    cpus = node["Resources"].get("CPU", 0)
    return [{"num_cpus": cpus}] if cpus else []


def _sites(slots: Sequence[RaySlot], note: Callable[[str], None]) -> list[tuple[RaySlot, Site]]:
    """Slots whose workers run, and what their hosts are. The others are closed.

    Raises:
        ConfigError: no worker runs.
    """
    found, reason = [], ""
    for slot in slots:
        try:
            found.append((slot, ray.get(slot.site, timeout=1.0)))
        except GetTimeoutError:
            reason = f"{slot.name}: what it needs was in use by others for {START_S:.0f} s"
        except RayError as error:
            lines = str(error).strip().splitlines()  # first who failed, last the exception
            reason = (
                f"{slot.name}: cannot run the project: {lines[0][:200]} {lines[-1][:200]}; see that its requirements are there"
            )
        else:
            continue
        note(f"not measured on {reason}")
        slot.close()
    if not found:
        raise ConfigError(f"--executor ray: {reason}")
    return found


def equal_sites(found: Sequence[tuple[RaySlot, Site]], note: Callable[[str], None]) -> tuple[list[RaySlot], Site]:
    """The largest group of slots whose hosts do not differ, and what these are. The others are closed."""
    groups: list[tuple[Site, list[RaySlot]]] = []
    for slot, site in found:
        mine = next((group for first, group in groups if first.difference(site) is None), None)
        if mine is None:
            groups.append((site, [slot]))
        else:
            mine.append(slot)
    site, chosen = max(groups, key=lambda group: len(group[1]))
    for other, left_out in groups:
        for slot in left_out if other is not site else ():
            note(f"not measured on {slot.name}: it differs from the others: {site.difference(other)}")
            slot.close()
    return chosen, site


def _require_same_checkpoints(there: Site, here: Site) -> None:
    for name, identity in here.files.items():
        if there.files[name] != identity:
            raise ConfigError(
                f"--executor ray: {name} is not the same on the nodes as here; put it on a path that all hosts share"
            )
