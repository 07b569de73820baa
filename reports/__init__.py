"""Reports from finished run directories (`render`: report.html, report.md; `render_together`: several runs) and over stored gates."""

from reports.history import render_history
from reports.render import render, render_together
from reports.rundata import ReportError

__all__ = ["ReportError", "render", "render_history", "render_together"]
