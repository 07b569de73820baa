"""The charts of a report: each takes plain numbers and gives a `Chart`, the picture with its words and the data behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from reports.svg import BAD, INK, MUTED, SERIES, SIZE_IN, SURFACE, draw
from reports.text import DASH, ms, number, percent, tau

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
MAX_CURVE_POINTS = 200
"""Points of a drawn distribution; the CSV holds the same points."""


@dataclass(frozen=True, slots=True)
class Table:
    """What of a chart people want to read off, as text: the first column names the row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture and its data. `rows` hold one value for each of `columns`."""

    id: str
    title: str
    description: str
    svg: Markup
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    where: str  # engine and trace
    table: Table | None = None


def _chart(
    chart_id: str,
    title: str,
    description: str,
    plot: Any,
    data: tuple[Sequence[str], Sequence[Sequence[Any]]],
    *,
    where: str = "",
    table: Table | None = None,
    height_in: float = SIZE_IN[1],
) -> Chart:
    columns, rows = data
    svg = Markup(draw(chart_id, title, description, plot, height_in=height_in))  # matplotlib escapes text, `draw` the titles
    return Chart(chart_id, title, description, svg, tuple(columns), tuple(tuple(r) for r in rows), where, table)


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: `y[i]` at `x[i]`, with an interval where there is one. `lead` is drawn strong, the others thin."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    ci95: tuple[tuple[float, float] | None, ...] = ()
    lead: bool = False


def speedup_by_batch(chart_id: str, lines: Sequence[Line], break_even: Mapping[str, Any] | None, *, where: str) -> Chart:
    """Speed-up of E2E p50 over batch size; the finalist strong, other configurations of its engine thin."""
    lead = next((line for line in lines if line.lead), None)
    at = break_even["value"] if break_even else None

    def plot(ax: Any) -> None:
        ax.axhline(1.0, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
        batches = sorted({x for line in lines for x in line.x})
        others = [line for line in lines if not line.lead]
        for i, line in enumerate(others):
            ax.plot(line.x, line.y, color=MUTED, linewidth=0.8, alpha=0.55, label="other configurations" if i == 0 else None)
        if lead:
            ax.plot(lead.x, lead.y, color=SERIES[0], marker="o", label=lead.label)
            for x, y, ci in zip(lead.x, lead.y, lead.ci95 or [None] * len(lead.x), strict=True):
                if ci:
                    ax.plot([x, x], ci, color=SERIES[0], linewidth=1.4)
                last = x == lead.x[-1] and len(lead.x) > 1  # beside the interval's line, and within the axes
                aside: dict[str, Any] = {"xytext": (-5 if last else 5, 5), "ha": "right" if last else "left"}
                ax.annotate(f"{y:.2f}×", (x, y), textcoords="offset points", fontsize=9.5, **aside)
        if at:
            ax.axvline(at, color=SERIES[1], linewidth=1.2, linestyle=":", label=f"break-even, about {at:.0f}")
        ax.set_xscale("log", base=2)
        ax.set_xticks(batches, [f"{b:g}" for b in batches])
        ax.minorticks_off()
        ax.set_xlabel("requests in flight (closed loop)")
        ax.set_ylabel("speed-up of E2E p50, ×")
        low, high = ax.get_ylim()
        ax.set_ylim(min(low, 0.9), high + 0.08 * (high - low))
        ax.legend(loc="best")

    spoken = f"Speed-up of E2E p50 against off by requests in flight, {where}."
    if lead:
        spoken += f" {lead.label}: " + ", ".join(f"{y:.2f} times at {x:g}" for x, y in zip(lead.x, lead.y, strict=True)) + "."
    rows = [
        (line.label, x, y, *(ci or (None, None)))
        for line in lines
        for x, y, ci in zip(line.x, line.y, line.ci95 or [None] * len(line.x), strict=True)
    ]
    columns = ("configuration", "requests_in_flight", "speedup", "ci95_low", "ci95_high")
    return _chart(chart_id, "Speed-up by batch size", spoken, plot, (columns, rows), where=where)


def position_rates(chart_id: str, series: Mapping[str, Sequence[float]], *, where: str) -> Chart:
    """Marginal acceptance m_i of each draft position; tau = 1 + their sum."""

    def plot(ax: Any) -> None:
        longest = max(len(rates) for rates in series.values())
        for i, (label, rates) in enumerate(series.items()):
            style = {"color": SERIES[i % len(SERIES)], "marker": MARKERS[i % len(MARKERS)]}
            ax.plot(range(1, len(rates) + 1), np.asarray(rates) * 100, label=label, **style)
        ax.set_xticks(range(1, longest + 1))
        ax.set_ylim(0, 104)
        ax.set_xlabel("draft position i")
        ax.set_ylabel("decode steps that accepted it, %")
        ax.legend(loc="best")

    spoken = f"Share of decode steps in which each draft position was accepted, {where}. " + " ".join(
        f"{label}: {', '.join(f'{r * 100:.0f} %' for r in rates)}." for label, rates in series.items()
    )
    rows = [(label, i, rate) for label, rates in series.items() for i, rate in enumerate(rates, start=1)]
    columns = ("configuration", "draft_position", "marginal_acceptance")
    return _chart(
        chart_id, "Acceptance by draft position", spoken, plot, (columns, rows), where=where, table=_rates_table(series)
    )


def _rates_table(series: Mapping[str, Sequence[float]]) -> Table:
    """Beside the marginal rates drawn, the conditional ones: m_i ÷ m_(i−1), acceptance given that all before were accepted."""
    longest = max(len(rates) for rates in series.values())
    rows = []
    for label, rates in series.items():
        given = [m / before if before else None for before, m in pairwise([1.0, *rates])]
        cells = [DASH if g is None else f"{g * 100:.0f} %" for g in given]
        rows.append((label, tau(1 + sum(rates)), *cells, *[DASH] * (longest - len(cells))))
    return Table(("Conditional acceptance", "1 + Σ mᵢ", *(f"i = {i}" for i in range(1, longest + 1))), tuple(rows))


def latency_ecdf(chart_id: str, name: str, series: Mapping[str, NDArray[np.float64]], *, where: str) -> Chart:
    """Share of requests that took at most x; `series` holds the latencies in seconds of each line."""
    curves = {label: _ecdf(values) for label, values in series.items()}

    def plot(ax: Any) -> None:
        for i, (label, (x, share)) in enumerate(curves.items()):
            style: dict[str, Any] = {"color": MUTED, "linestyle": (0, (5, 2))} if label == "off" else {"color": SERIES[i - 1]}
            ax.plot(x * 1e3, share * 100, drawstyle="steps-post", label=label, **style)
        for level in (50, 95):
            ax.axhline(level, color=MUTED, linewidth=0.8, linestyle=":")
        ax.set_yticks([0, 25, 50, 75, 95])
        ax.set_xlim(left=0)
        ax.set_ylim(0, 101)
        ax.set_xlabel(f"{name}, ms")
        ax.set_ylabel("requests, %")
        ax.legend(loc="lower right")

    spoken = f"Distribution of {name}, {where}. " + " ".join(
        f"{label}: median {np.median(values) * 1e3:.0f} ms, 95th percentile {np.percentile(values, 95) * 1e3:.0f} ms."
        for label, values in series.items()
    )
    rows = [(label, float(v), float(s)) for label, (x, share) in curves.items() for v, s in zip(x, share, strict=True)]
    data = (("configuration", "seconds", "share_at_most"), rows)
    return _chart(
        chart_id, f"{name} of completed requests", spoken, plot, data, where=where, table=_quantile_table(name, series)
    )


def _quantile_table(name: str, series: Mapping[str, NDArray[np.float64]]) -> Table:
    levels = (50, 90, 95, 99)
    rows = [(label, f"{len(v):,}", *(ms(float(q)) for q in np.percentile(v, levels))) for label, v in series.items()]
    return Table((f"{name}, ms", "requests", *(f"p{level}" for level in levels)), tuple(rows))


def _ecdf(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    shares = np.arange(1, len(values) + 1) / len(values)
    if len(values) <= MAX_CURVE_POINTS:
        return np.sort(values), shares
    shares = np.linspace(0, 1, MAX_CURVE_POINTS)
    return np.quantile(values, shares, method="inverted_cdf"), shares


@dataclass(frozen=True, slots=True)
class Point:
    """One trial in the latency-throughput plane."""

    label: str
    family: str  # variant: shape and colour
    trial: int
    load: str
    latency_s: float
    tokens_per_s: float


def latency_throughput(chart_id: str, points: Sequence[Point], *, where: str) -> Chart:
    """E2E p50 against throughput of every closed-loop trial; the line joins those that no other beats on both."""
    front = pareto_front(points)

    def plot(ax: Any) -> None:
        ordered = sorted(front, key=lambda p: p.tokens_per_s)
        line = [p.tokens_per_s for p in ordered], [p.latency_s * 1e3 for p in ordered]
        ax.plot(*line, color=INK, linewidth=1.0, label="not beaten on both")
        families = list(dict.fromkeys(p.family for p in points))
        for i, family in enumerate(sorted(families, key=lambda f: f != "off")):
            mine = [p for p in points if p.family == family]
            colour = MUTED if family == "off" else SERIES[(i - ("off" in families)) % len(SERIES)]
            x, y = [p.tokens_per_s for p in mine], [p.latency_s * 1e3 for p in mine]
            marks: dict[str, Any] = {
                "marker": MARKERS[i % len(MARKERS)],
                "markersize": 7,
                "markeredgecolor": SURFACE,
                "markeredgewidth": 0.8,
            }
            ax.plot(x, y, **marks, linestyle="none", color=colour, label=family)
        ax.set_yscale("log")
        _plain_log_ticks(ax)
        ax.set_xlabel("output tokens/s (right is better)")
        ax.set_ylabel("E2E p50, ms (down is better)")
        ax.legend(loc="best")

    best = ", ".join(f"{p.label} at {p.load}" for p in front)
    spoken = f"{len(points)} closed-loop trials by throughput and E2E p50, {where}. Not beaten on both: {best}."
    rows = [(p.trial, p.family, p.label, p.load, p.latency_s, p.tokens_per_s, p in front) for p in points]
    columns = ("trial", "variant", "configuration", "load", "e2e_p50_s", "output_tokens_per_s", "on_front")
    front_rows = [(p.label, p.load, ms(p.latency_s), number(p.tokens_per_s), str(p.trial)) for p in front]
    table = Table(("Not beaten on both", "Load", "E2E p50 ms", "Tokens/s", "Trial"), tuple(front_rows))
    return _chart(chart_id, "Latency against throughput", spoken, plot, (columns, rows), where=where, table=table)


def _plain_log_ticks(ax: Any) -> None:
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.yaxis.set_minor_locator(NullLocator())


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Points for which no other has both lower latency and higher throughput (or equals one and betters the other)."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.latency_s, -p.tokens_per_s)):
        if not front or point.tokens_per_s > front[-1].tokens_per_s:
            front.append(point)
    return front


def stage_costs(chart_id: str, stages: Mapping[str, float], grid_s: float | None) -> Chart:
    """Seconds spent in each stage, beside the estimate for the full grid."""

    def plot(ax: Any) -> None:
        left = 0.0
        for i, (stage, spent_s) in enumerate(stages.items()):
            ax.barh(
                [1],
                [spent_s / 60],
                left=left / 60,
                color=SERIES[i % len(SERIES)],
                edgecolor=SURFACE,
                label=stage.replace("_", " "),
                height=0.55,
            )
            left += spent_s
        labels = ["this run (measured)"]
        if grid_s:
            ax.barh([0], [grid_s / 60], color="none", edgecolor=BAD, linestyle="--", linewidth=1.2, height=0.55)
            labels = ["full grid (estimated)", *labels]
        ax.set_yticks(range(2 - len(labels), 2), labels)
        ax.grid(False, axis="y")
        ax.set_xlabel("minutes")
        ax.legend(loc="lower center", bbox_to_anchor=(0.35, 1.0), ncols=3)

    spoken = "Time spent: " + ", ".join(f"{stage} {spent / 60:.1f} min" for stage, spent in stages.items()) + "."
    spoken += f" The full grid is estimated at {grid_s / 60:.0f} min." if grid_s else ""
    rows: list[tuple[Any, ...]] = [(stage, "measured", spent) for stage, spent in stages.items()]
    rows += [("full grid", "estimated", grid_s)] if grid_s else []
    return _chart(chart_id, "Time by stage", spoken, plot, (("stage", "kind", "seconds"), rows), height_in=2.1)


def replicas(chart_id: str, sides: Mapping[str, Sequence[Mapping[str, Any]]], *, where: str) -> Chart:
    """Replicas for the trace's busiest minute over time scale; `sides` holds the fleet of off and of on."""

    def plot(ax: Any) -> None:
        scales: list[float] = []
        for side, fleet in sides.items():
            scales = [row["time_scale"] for row in fleet]
            style: dict[str, Any] = {"color": MUTED, "marker": "s", "linestyle": (0, (5, 2))}
            if side == "on":
                style = {"color": SERIES[0], "marker": "o"}
            ax.plot(scales, [row["replicas_peak"] for row in fleet], label=side, **style)
        ax.set_xscale("log", base=2)
        ax.set_xticks(scales, [f"{scale:g}" for scale in scales])
        ax.minorticks_off()
        ax.set_ylim(0, 1.3 * max(row["replicas_peak"] for fleet in sides.values() for row in fleet))
        ax.yaxis.get_major_locator().set_params(integer=True)
        ax.set_xlabel("time × (0.5: twice the load)")
        ax.set_ylabel("replicas")
        ax.legend(loc="best")

    spoken = f"Replicas for the busiest minute over time scale, {where}. " + " ".join(
        f"{side}: " + ", ".join(f"{row['replicas_peak']} at {row['time_scale']:g}" for row in fleet) + "."
        for side, fleet in sides.items()
    )
    columns = (
        "side",
        "time_scale",
        "p95_minute_rps",
        "peak_minute_rps",
        "replicas_p95",
        "replicas_peak",
        "headroom",
        "usd_per_hour",
    )
    rows = [(side, *(row[name] for name in columns[1:])) for side, fleet in sides.items() for row in fleet]
    return _chart(
        chart_id,
        "Replicas for the busiest minute",
        spoken,
        plot,
        (columns, rows),
        where=where,
        table=_fleet_table(sides),
    )


def _fleet_table(sides: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """A row for each time scale, the figures of off and on beside each other; prices where there are any."""
    figures: list[tuple[str, str, Callable[[Any], str]]] = [
        ("p95 minute", "replicas_p95", number),
        ("busiest minute", "replicas_peak", number),
        ("headroom", "headroom", percent),
    ]
    if any(row["usd_per_hour"] is not None for fleet in sides.values() for row in fleet):
        figures.append(("USD/h", "usd_per_hour", number))
    columns = [f"{title}, {side}" for title, _, _ in figures for side in sides]
    rows = [
        (f"{together[0]['time_scale']:g}", *(show(row[name]) for _, name, show in figures for row in together))
        for together in zip(*sides.values(), strict=True)
    ]
    return Table(("time ×", *columns), tuple(rows))
