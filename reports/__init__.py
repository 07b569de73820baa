"""Reports from finished run directories: `render` writes report.html and report.md."""

from reports.render import render
from reports.rundata import ReportError

__all__ = ["ReportError", "render"]
