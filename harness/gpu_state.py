"""Clocks, temperature and throttling of our GPUs while a load runs. A throttled load measures the cooling."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from backends.gpus import visible_handles

PERIOD_S = 1.0
SLOWED_SHARE = 0.05
"""Share of readings with a slowdown from which on a load is not valid."""

SLOWDOWNS = {0x08: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
"""Bits of NVML's clock event reasons that take clocks away. The power cap (0x04) holds on any busy GPU and is only reported."""
POWER_CAP = 0x04


@dataclass(frozen=True, slots=True)
class Reading:
    sm_clock_mhz: int
    temperature_c: int
    reasons: int  # NVML's bit mask


class GpuWatch:
    """Reads our GPUs once a period. Made and closed around one load."""

    def __init__(self, nvml: ModuleType | Any) -> None:
        """`nvml` is `pynvml`, initialised."""
        self._nvml = nvml
        self._gpus = visible_handles(nvml)
        self.readings: list[list[Reading]] = [[] for _ in self._gpus]

    @staticmethod
    def here() -> GpuWatch | None:
        """None where no NVIDIA driver or GPU is, or none that CUDA_VISIBLE_DEVICES names."""
        import pynvml

        try:
            pynvml.nvmlInit()
            watch = GpuWatch(pynvml)
        except pynvml.NVMLError:
            return None
        return watch if watch.readings else None

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def read(self) -> None:
        nvml = self._nvml
        for gpu, readings in zip(self._gpus, self.readings, strict=True):
            try:
                clock = nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)
                temperature = nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
                readings.append(Reading(clock, temperature, nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)))
            except nvml.NVMLError:
                continue  # a virtual GPU may not say

    async def sample(self) -> None:
        """Read until cancelled, in a thread: a driver call may take milliseconds, which would delay what the client reads."""
        while True:
            await asyncio.to_thread(self.read)
            await asyncio.sleep(PERIOD_S)

    def summary(self) -> list[dict[str, Any]] | None:
        """One entry a GPU: SM clock (MHz) and temperature (°C) over the load, and the share of readings with each slowdown."""
        if not any(self.readings):
            return None
        return [_summary(index, readings) for index, readings in enumerate(self.readings) if readings]

    def problem(self) -> str | None:
        """Why the load cannot be used; None where clocks were left alone."""
        for gpu in self.summary() or ():
            for reason, share in gpu["slowed"].items():
                if share > SLOWED_SHARE:
                    return (
                        f"GPU {gpu['index']} was slowed down in {share:.0%} of the readings ({reason}; up to "
                        f"{gpu['temperature_c']['max']} °C, SM clock down to {gpu['sm_clock_mhz']['min']} MHz)"
                    )
        return None


def _summary(index: int, readings: list[Reading]) -> dict[str, Any]:
    clocks, degrees = [r.sm_clock_mhz for r in readings], [r.temperature_c for r in readings]

    def share(bit: int) -> float:
        return sum(bool(r.reasons & bit) for r in readings) / len(readings)

    return {
        "index": index,
        "sm_clock_mhz": {"min": min(clocks), "mean": sum(clocks) / len(clocks), "max": max(clocks)},
        "temperature_c": {"first": degrees[0], "max": max(degrees)},
        "power_capped": share(POWER_CAP),
        "slowed": {name: share(bit) for bit, name in SLOWDOWNS.items() if share(bit)},
    }
