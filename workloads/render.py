"""A profile for people: tables for the terminal, a plot of arrivals and lengths."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from workloads.profile import Profile
from workloads.types import Trace


def render_profile(profile: Profile) -> list[RenderableType]:
    """What `inspect` prints, top to bottom."""
    summary = profile.summary
    rows: list[tuple[str, ...]] = [
        ("format", summary["format"]),
        ("rows", f"{summary['read']} read, {summary['kept']} kept"),
        *((f"dropped: {reason}", str(count)) for reason, count in summary["dropped"].items()),
        ("content grade", f"{summary['content_grade']}: {summary['grade_reason']}"),
        ("span", _number(profile.arrivals["span_s"], "s")),
        ("rate", f"mean {_number(profile.arrivals['mean_rps'], '/s')}, peak {_number(profile.arrivals['peak_rps'], '/s')}"),
        ("index of dispersion (1 s)", _number(profile.arrivals["dispersion"])),
        ("arrival grid", _number(profile.arrivals["quantum_s"], "s")),
        ("concurrency", _concurrency(profile.concurrency)),
        ("input that repeats a prefix", _share(profile.prefix_sharing["share"])),
        ("sessions", f"{profile.sessions['count']}, {_number(profile.sessions['requests_per_session'])} requests each"),
        ("temperature", ", ".join(f"{name} {_share(share)}" for name, share in profile.requests["temperature"].items())),
        ("structured output, tools", f"{_share(profile.requests['structured_output'])}, {_share(profile.requests['tools'])}"),
        ("with recorded output", _share(profile.requests["recorded_output"])),
    ]
    found: list[RenderableType] = [_table(str(summary["trace"]), ("", ""), rows)]
    lengths = [(name, *(_number(values[p]) for p in ("p50", "p95", "max"))) for name, values in profile.lengths.items()]
    if lengths:
        found.append(_table("lengths", ("", "p50", "p95", "max"), lengths))
    if profile.acceptance:
        found.append(_acceptance(profile))
    found += [Text(f"note: {note}", style="dim") for note in summary["notes"]]
    found += [Text(f"warning: {warning}", style="yellow") for warning in profile.warnings]
    return found


def _acceptance(profile: Profile) -> Table:
    """One row a drafter setting, category and context; one column a K."""
    ks = sorted({part["k"] for part in profile.acceptance})
    cells: dict[tuple[str, ...], dict[int, float | None]] = {}
    for part in profile.acceptance:
        sizes = "" if part["min_n"] is None else f" n {part['min_n']}-{part['max_n']}"
        where = f"{part['context_from']}-{part['context_to'] or ''}" if part["context_from"] or part["context_to"] else "all"
        cells.setdefault((part["variant"] + sizes, part["category"] or "all", where), {})[part["k"]] = part["tau"]
    rows = [(*key, *(_number(values.get(k)) for k in ks)) for key, values in cells.items()]
    return _table(
        "tau on the recorded outputs (exact, no engine)", ("drafter", "category", "context", *(f"K={k}" for k in ks)), rows
    )


def _table(title: str, headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(headings))
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i == 0 else "right" if len(headings) > 2 else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _concurrency(values: Mapping[str, Any]) -> str:
    if values["mean"] is None:
        return "unknown (no service time recorded or given)"
    return f"mean {values['mean']:.3g}, at most {values['max']} at a service time of {values['service_time_s']:.3g} s"


def _number(value: float | None, unit: str = "") -> str:
    return "unknown" if value is None else f"{value:,.4g}{' ' if unit and unit[0].isalpha() else ''}{unit}"


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0%}"


def profile_svg(trace: Trace) -> str:
    """Arrivals per second over time, and the distributions of input and output lengths, as one SVG drawing."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
    times = trace.arrivals_s[~np.isnan(trace.arrivals_s)]
    if len(times):
        bins = np.linspace(0, max(float(times.max()), 1.0), 121)
        counts, edges = np.histogram(times, bins)
        left.step(edges[:-1], counts / np.diff(edges), where="post")
    left.set(xlabel="seconds", ylabel="requests per second", title="Arrivals")
    for name in ("input_tokens", "output_tokens"):
        values = np.sort(trace.numbers(name)[~np.isnan(trace.numbers(name))])
        if len(values):
            right.plot(values, np.arange(1, len(values) + 1) / len(values), label=name.replace("_", " "))
    if right.lines:
        right.set_xscale("log")
        right.legend()
    right.set(xlabel="tokens", ylabel="share of requests at most this long", title="Lengths")
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": trace.sha256, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    plt.close(figure)
    return buffer.getvalue()
