"""A metric over many gates: its chart, and where its level changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import ruptures
from markupsafe import Markup
from numpy.typing import NDArray

from reports.figures import Chart
from reports.svg import BAD, SERIES, draw

MIN_SEGMENT = 3  # gates on one side of a change: fewer are an outlier
PENALTY = 6.0  # of a further change point, times log n: marks some 3 % of short series of pure noise, hardly any longer one
LEAST_NOISE = 5e-4  # a counter that hardly varies: a change of half a per mille is none


def change_points(values: NDArray[np.float64]) -> list[int]:
    """Indices at which the level of a series of positive values changes; empty for a short or an even one.

    Piecewise constant fit of the logarithms with PELT (Killick et al. 2012, JASA 107). The penalty is in units of the noise
    variance, taken from successive differences (median absolute, ÷ √2), so that a change of level does not count as noise.
    """
    if len(values) < 2 * MIN_SEGMENT or np.any(values <= 0):
        return []
    logs = np.log(values)
    noise = 1.4826 * float(np.median(np.abs(np.diff(logs)))) / math.sqrt(2)
    search = ruptures.Pelt(model="l2", min_size=MIN_SEGMENT, jump=1).fit(logs / max(noise, LEAST_NOISE))
    found = search.predict(pen=PENALTY * math.log(len(logs)))
    return [int(i) for i in found[:-1]]


def trend(chart_id: str, label: str, points: Sequence[tuple[int, str, float]], changes: Sequence[int], *, unit: str) -> Chart:
    """One metric over the gates, `points` as (number of the gate, its time, value); a dashed line where the level changed."""
    scale, shown = (1e3, "ms") if unit == "s" else (1.0, unit)

    def plot(ax: Any) -> None:
        x, y = [i + 1 for i, _, _ in points], [value * scale for _, _, value in points]
        ax.plot(x, y, marker="o", color=SERIES[0])
        for at in changes:
            ax.axvline(at + 0.5, color=BAD, linestyle="--", linewidth=1.2)
        ax.set_xlabel("gate, oldest first")
        ax.set_ylabel(f"{label}, {shown}")
        ax.xaxis.get_major_locator().set_params(integer=True)

    spoken = f"{label} of {len(points)} gates, from {points[0][2] * scale:.4g} to {points[-1][2] * scale:.4g} {shown}; "
    spoken += f"{len(changes)} changes of level marked." if changes else "no change of level."
    svg = Markup(draw(chart_id, label, spoken, plot))  # matplotlib escapes text, `draw` the titles
    rows = tuple((i + 1, created, value, i in changes) for i, created, value in points)
    return Chart(chart_id, label, spoken, svg, ("gate", "created", f"value_{unit}", "level_changed"), rows, "")
