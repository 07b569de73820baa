"""Clocks and throttling, from a driver of which every answer is known."""

from __future__ import annotations

import asyncio

import pytest

from harness import gpu_state
from harness.gpu_state import GpuWatch


class FakeNvml:
    """Two GPUs; the second does not say anything. `reasons` are the first's, reading by reading."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    class NVMLError(Exception):
        pass

    def __init__(self, reasons: list[int]) -> None:
        self.reasons = reasons
        self.count = 0
        self.open = True

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetClockInfo(self, gpu: int, kind: int) -> int:
        if gpu == 1:
            raise self.NVMLError
        assert kind == self.NVML_CLOCK_SM
        return 1980 if self.reasons[self.count] < 8 else 1200

    def nvmlDeviceGetTemperature(self, gpu: int, kind: int) -> int:
        return 60 + self.count

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: int) -> int:
        self.count += 1
        return self.reasons[self.count - 1]

    def nvmlShutdown(self) -> None:
        self.open = False


def watched(reasons: list[int]) -> GpuWatch:
    watch = GpuWatch(FakeNvml(reasons))
    for _ in reasons:
        watch.read()
    return watch


def test_clocks_and_temperature_are_summed_up_for_each_gpu_that_answers() -> None:
    watch = watched([0, 4, 4, 0])
    assert watch.summary() == [
        {
            "index": 0,
            "sm_clock_mhz": {"min": 1980, "mean": 1980, "max": 1980},
            "temperature_c": {"first": 60, "max": 63},
            "power_capped": 0.5,
            "slowed": {},
        }
    ]
    assert watch.problem() is None  # the power cap is no fault of the machine


@pytest.mark.parametrize(("bit", "name"), [(0x08, "hardware slowdown"), (0x20, "software thermal"), (0x40, "hardware thermal")])
def test_a_load_that_was_slowed_down_is_not_valid(bit: int, name: str) -> None:
    problem = watched([0] * 8 + [bit, bit | 4]).problem()
    assert problem == f"GPU 0 was slowed down in 20% of the readings ({name}; up to 69 °C, SM clock down to 1200 MHz)"


def test_one_reading_in_thirty_is_let_pass() -> None:
    watch = watched([0] * 29 + [0x20])
    assert watch.problem() is None
    assert (watch.summary() or [{}])[0]["slowed"] == {"software thermal": 1 / 30}


def test_readings_go_on_until_cancelled_and_the_driver_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_state, "PERIOD_S", 0.001)
    nvml = FakeNvml([0] * 100_000)
    watch = GpuWatch(nvml)

    async def go() -> None:
        task = asyncio.create_task(watch.sample())
        while len(watch.readings[0]) < 3:
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(go())
    watch.close()
    assert not nvml.open


def test_nothing_read_is_nothing_said() -> None:
    watch = GpuWatch(FakeNvml([]))
    assert (watch.summary(), watch.problem()) == (None, None)
