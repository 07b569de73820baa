"""Which GPUs of this host are ours."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any


def visible_gpus() -> tuple[str, ...]:
    """As CUDA_VISIBLE_DEVICES names them (indices or UUIDs); all of the host's where it is not set; empty without an NVIDIA driver."""
    import pynvml

    named = _named()
    if named is not None:
        return named
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(map(str, range(pynvml.nvmlDeviceGetCount())))
    finally:
        pynvml.nvmlShutdown()


def visible_handles(nvml: ModuleType | Any) -> list[Any]:
    """NVML's handles of the same GPUs: NVML itself shows all of the host's. `nvml` is `pynvml`, initialised.

    Raises:
        NVMLError: no such GPU.
    """
    named = _named()
    if named is None:
        return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    return [nvml.nvmlDeviceGetHandleByIndex(int(n)) if n.isdigit() else nvml.nvmlDeviceGetHandleByUUID(n) for n in named]


def _named() -> tuple[str, ...] | None:
    """What CUDA_VISIBLE_DEVICES lists; None where it is not set."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if listed is None else tuple(filter(None, (name.strip() for name in listed.split(","))))
