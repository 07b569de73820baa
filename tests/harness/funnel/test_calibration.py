from dataclasses import replace

import pytest

from harness.funnel.calibration import calibrate
from harness.funnel.step_cost import StepCost
from tests.harness.funnel.loads import OFF, observe, on

COST = StepCost(0.01, 1e-4, 0, 5e-5, 0, 1, error=0.05)
CELLS = [(on(variant, k), batch) for variant in ("eagle3", "mtp") for k in (1, 3, 6) for batch in (1, 4, 16)]


def load(variant: str, k: int, batch: int, cost_s: float = 60.0):  # type: ignore[no-untyped-def]
    return replace(observe(on(variant, k), batch), cost_s=cost_s)


def test_a_measured_cell_corrects_itself_and_its_neighbours_and_hardly_another_drafter() -> None:
    offs = [replace(observe(OFF, batch), cost_s=60.0) for batch in (1, 4, 16)]
    loads = [*offs, load("mtp", 6, 4), *[load("eagle3", 3, 4)] * 3]
    found = calibrate(COST, loads, [(1.0, 1.0)] * 4 + [(1.1, 1.0)] * 3, CELLS)
    mean = {cell: found.mean[row] for cell, row in found.rows.items()}
    sd = {cell: found.covariance[row, row] ** 0.5 for cell, row in found.rows.items()}
    here, near, far = (on("eagle3", 3), 4), (on("eagle3", 3), 1), (on("mtp", 1), 1)
    assert mean[here] == pytest.approx(0.08, abs=0.02)  # log 1.1, less what may be the machine
    assert 0.02 < mean[near] < mean[here]
    assert abs(mean[far]) < 0.02
    assert sd[here] < sd[near] < sd[far]


def test_what_all_servers_share_at_a_batch_size_cancels_in_a_speed_up() -> None:
    offs = [replace(observe(OFF, batch), cost_s=60.0) for batch in (1, 4, 16)]
    ratios = [(1.0, 1.0), (1.0, 1.0), (2.0, 8.0), (1.0, 1.0), (2.0, 8.0)]  # at 16 the KV cache is too small for off and on
    found = calibrate(COST, [*offs, load("mtp", 6, 4), load("mtp", 6, 16)], ratios, [*CELLS, (OFF, 16), (OFF, 4)])
    off, on_ = found.rows[OFF, 16], found.rows[on("eagle3", 3), 16]
    assert found.mean[on_] == pytest.approx(found.mean[off], abs=0.1)
    assert found.mean[off] > 0.5


def test_a_slow_machine_is_not_taken_for_a_slow_drafter() -> None:
    offs = [replace(observe(OFF, batch), cost_s=60.0) for batch in (1, 4, 16)]
    probes = [load("mtp", 6, 4, 600.0), load("mtp", 6, 16)]
    slow_drafter = calibrate(COST, [*offs, *probes], [(1.0, 1.0)] * 3 + [(1.15, 1.0)] * 2, CELLS)
    slow_machine = calibrate(COST, [*offs, *probes], [(1.0, 1.0)] * 3 + [(1.15, 1.15)] * 2, CELLS)
    row = slow_drafter.rows[on("mtp", 6), 4]
    assert slow_drafter.mean[row] > 0.09
    assert slow_machine.mean[row] < 0.6 * slow_drafter.mean[row]
    later = [load("mtp", 6, 4, 600.0), load("mtp", 6, 16)]  # the same server when the machine is as fast as before
    readings = [(1.0, 1.0)] * 3 + [(1.15, 1.15)] * 2 + [(1.0, 1.0)] * 2
    assert abs(calibrate(COST, [*offs, *probes, *later], readings, CELLS).mean[row]) < 0.02
