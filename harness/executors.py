"""Where a run measures: in this process, on all GPUs of this host (`local`), or on the nodes of a Ray cluster (`ray`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from backends.gpus import visible_gpus
from harness.bench import Setup
from harness.settings import RunSettings
from harness.site import Site, site_of
from harness.slots import Here, LocalSlot, Slot
from harness.smoke import smoke_requests
from workloads.types import Request


def open_slots(
    settings: RunSettings, requests: Sequence[Request], servers: Path, note: Callable[[str], None]
) -> tuple[list[Slot], Site]:
    """The slots of `--executor`, and what the hosts are that they are on. `servers` is the folder for servers on this host.

    Raises:
        ConfigError: there is no such cluster, or no node of it can measure.
    """
    gpus = visible_gpus()
    setup = Setup(settings, smoke_requests(requests), servers, gpus=len(gpus))
    if settings.executor == "ray":
        from harness.ray_slots import ray_slots  # Ray is an extra

        return ray_slots(setup, note)
    slots: list[Slot] = [Here(setup)]
    if settings.executor == "local":
        slots = local_slots(setup, gpus)
        note(
            f"{len(slots)} slots of {settings.tensor_parallel} GPUs"
            if len(slots) > 1
            else "one slot: this host has no GPUs for a second one"
        )
    return slots, site_of(settings)


def local_slots(setup: Setup, gpus: Sequence[str]) -> list[Slot]:
    """One for each `tensor_parallel` of these GPUs; this process where they are enough for one at most."""
    size = setup.settings.tensor_parallel
    groups = [gpus[i : i + size] for i in range(0, len(gpus) - size + 1, size)]
    return [LocalSlot(setup, group) for group in groups] if len(groups) > 1 else [Here(setup)]
