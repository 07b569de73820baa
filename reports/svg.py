"""A matplotlib figure as inline SVG that follows the page: colours are CSS variables, text is text, ids are its own."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, GRID, SURFACE = "#010101", "#020202", "#030303", "#040404"
BAD = "#050505"
SERIES = tuple(f"#06060{i}" for i in range(1, 9))
"""Stand-ins that matplotlib draws with; `to_svg` puts a CSS variable in the place of each."""

_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", SURFACE: "--surface", BAD: "--bad"}
_VARIABLES |= {colour: f"--s{i}" for i, colour in enumerate(SERIES, start=1)}

STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",  # always there, so that layout does not depend on the machine; the page's font is shown
    "font.size": 10.5,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 10,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}

SIZE_IN = (4.8, 3.1)
"""Narrow enough that its text stays readable on a phone, where the figure fills the width."""


def draw(figure_id: str, title: str, description: str, plot: Callable[[Any], None], *, height_in: float = SIZE_IN[1]) -> str:
    """Run `plot(axes)` on an empty chart and return it as `<svg>` markup for an HTML page.

    `title` and `description` are what a screen reader says.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    style: Any = {**STYLE, "svg.hashsalt": figure_id}  # the stubs list every key as a literal
    with mpl.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Glyph .* missing.*")
        figure = Figure(figsize=(SIZE_IN[0], height_in), layout="constrained")
        plot(figure.subplots())
        return to_svg(figure, figure_id, title, description)


def to_svg(figure: Figure, figure_id: str, title: str, description: str) -> str:
    """Markup of `figure`, without prolog, metadata or a fixed size."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{figure_id}-\1"', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{figure_id}-", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\d+\.\d\d)\d+", r"\1", tag.group()), svg)  # hundredths of a point are enough
    svg = re.sub(r"\n\s*", "\n", svg)
    names = f'role="img" aria-labelledby="{figure_id}-title {figure_id}-desc" class="chart"'
    view_box = re.search(r'viewBox="[^"]+"', svg)
    assert view_box is not None  # matplotlib always writes one
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {view_box.group()} {names}>'
        f'<title id="{figure_id}-title">{escape(title)}</title><desc id="{figure_id}-desc">{escape(description)}</desc>'
    )
    return head + svg[svg.index(">") + 1 :]
