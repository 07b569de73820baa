"""A lab over slow simulated engines (real processes, real HTTP), for tests of where loads are measured."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from backends.simulated.world import Draft, Limits, TargetCost, World, dump_world
from backends.types import ServingConfig
from harness.bench import Setup
from harness.findings import closed_load
from harness.lab import Lab, Wanted
from harness.progress import RunProgress
from harness.settings import RunSettings
from harness.site import site_of
from harness.slots import Slot
from harness.store import RunStore
from workloads.load import load_trace

REQUESTS = (0, 1, 2, 3)


def write_world(folder: Path, step_s: float = 0.1) -> Path:
    """Steps so long that a busy machine does not make the client late."""
    drafts = {"ngram": Draft({"default": (0.6, 0.4, 0.3, 0.2, 0.15)}), "suffix": Draft({"default": (0.5, 0.3, 0.2, 0.1, 0.05)})}
    world = World(
        "slow", TargetCost(step_s, 0.0, 0.001, 0.005), drafts=drafts, limits=Limits(max_num_seqs=8, max_model_len=512)
    )
    path = folder / "world.json"
    path.write_text(dump_world(world))
    return path


def write_trace(folder: Path, requests: int = 12) -> Path:
    path = folder / "trace.jsonl"
    rows = [f'{{"arrival_s": {i}.0, "prompt": "question {i} about a thing", "max_tokens": 6}}\n' for i in range(requests)]
    path.write_text("".join(rows))
    return path


class SimulatedLab:
    """`make` gives the slots for a setup."""

    def __init__(self, folder: Path, make: Callable[[Setup], list[Slot]]) -> None:
        folder.mkdir(exist_ok=True)
        trace, self.world = write_trace(folder), write_world(folder)
        settings = RunSettings((str(trace),), str(folder / "run"), backends=("simulated",), model=str(self.world))
        self.store = RunStore(folder / "run")
        traces = {"trace.jsonl": load_trace(str(trace))}
        slots = make(Setup(settings, (), self.store.servers_dir, 0))
        self.lab = Lab(settings, self.store, traces, RunProgress(), [], slots, site_of(settings))

    def config(self, k: int) -> ServingConfig:
        return ServingConfig("simulated", str(self.world), "ngram" if k else "off", k, max_num_seqs=8)

    def wanted(self, cell: tuple[int, int]) -> list[Wanted]:
        """The load of a (K, concurrency) cell."""
        k, concurrency = cell
        return [Wanted(self.config(k), closed_load("trace.jsonl", concurrency), REQUESTS, "search", "search")]


def wait_for_engines(folder: Path, count: int) -> list[psutil.Process]:
    """Wait until so many engines run; they and what supervises them."""
    deadline = time.monotonic() + 240
    while True:
        found = engines_of(folder)
        if sum(not is_supervisor(process) for process in found) >= count:
            return found
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_supervisor(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(part.endswith("supervisor.py") for part in process.cmdline())
    return True


def engines_of(folder: Path) -> list[psutil.Process]:
    """Processes of engines of this folder's world, and what supervises them."""
    world = str(folder / "world.json")
    return [p for p in psutil.process_iter(["cmdline"]) if any(world in part for part in p.info["cmdline"] or ())]
