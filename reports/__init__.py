"""Reports from finished run directories (`render`: report.html, report.md) and over stored gates (`render_history`)."""

from reports.history import render_history
from reports.render import render
from reports.rundata import ReportError

__all__ = ["ReportError", "render", "render_history"]
