"""When a warm-up ends."""

from __future__ import annotations

import pytest

from harness.warmup import is_stable


@pytest.mark.parametrize(
    ("waves", "ends_at"),
    [
        ([0.020, 0.021], 2),  # warm from the start
        ([0.500, 0.020, 0.020], 3),  # compiled in the first wave
        ([0.020, 0.300, 0.020], 3),  # compiled for a new shape in the second
        ([0.040, 0.030, 0.024, 0.023], 4),  # still becoming faster
        ([0.020, 0.025], 2),  # a busy machine
        ([0.00005, 0.00012], 2),  # steps too short to tell apart
    ],
)
def test_it_ends_when_steps_no_longer_become_faster(waves: list[float], ends_at: int) -> None:
    ended = [i + 1 for i, step_s in enumerate(waves) if is_stable(step_s, waves[:i])]
    assert ended[0] == ends_at
