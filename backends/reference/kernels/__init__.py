"""Triton kernels of the CUDA path, one file each. Everything they do has a torch path beside it, which runs everywhere else."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

import torch


def usable(device: torch.device) -> bool:
    """Whether tensors on `device` go to these kernels."""
    return device.type == "cuda" and find_spec("triton") is not None


def reads_fp8(device: torch.device) -> bool:
    """Whether what runs on `device` can read a KV cache of fp8. GPUs before compute capability 8.9 have no e4m3."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the thread's current GPU, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
