"""Where a run happened: host, GPUs, versions, and one fingerprint. Results are comparable only where the fingerprint is equal."""

from __future__ import annotations

import hashlib
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("torch", "transformers", "tokenizers", "optuna", "numpy", "scipy", "triton", "uvicorn", "vllm", "sglang")


def environment() -> dict[str, Any]:
    """The `environment` object of result.json. The fingerprint covers hardware and versions, not the load of the moment."""
    found = {"host": _host(), "gpu": _gpus(), "versions": _versions()}
    text = json.dumps(found, sort_keys=True)
    return {**found, "fingerprint": "sha256:" + hashlib.sha256(text.encode()).hexdigest()}


def _host() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "threads": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[dict[str, Any]]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []  # no NVIDIA driver: a CPU host
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        driver = pynvml.nvmlSystemGetDriverVersion()
        return [
            {
                "name": pynvml.nvmlDeviceGetName(handle),
                "memory_gib": round(pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30),
                "driver": driver,
            }
            for handle in handles
        ]
    finally:
        pynvml.nvmlShutdown()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
