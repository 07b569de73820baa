"""Triton kernels of the CUDA path, one file each. Everything they do has a torch path beside it, which runs everywhere else."""

from __future__ import annotations

from importlib.util import find_spec

import torch


def usable(device: torch.device) -> bool:
    """Whether tensors on `device` go to these kernels."""
    return device.type == "cuda" and find_spec("triton") is not None
