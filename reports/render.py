"""From a finished run directory to `report.html` and `report.md`."""

from __future__ import annotations

import base64
import hashlib
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from backends.files import write_whole
from reports import charts, text
from reports.answer import answers
from reports.interchange import write_interchange, write_records
from reports.rundata import RunData, load_run
from reports.sections import SECTIONS
from reports.side_by_side import compare_runs, environments, names_of

_TEMPLATES = Path(__file__).with_name("templates")


def render(run_dir: Path | Sequence[Path], *, show_text: bool = False, records: bool = False) -> None:
    """Write `report.html`, `report.md` and the files for other tools (``interchange/``) into each run directory.

    Text of prompts and outputs is left out unless `show_text`. `records` adds one table of all requests, Parquet and CSV.

    Raises:
        ReportError: a directory holds no finished run.
        ResultError: a result breaks the schema.
    """
    folders = [run_dir] if isinstance(run_dir, Path) else list(run_dir)
    for folder in folders:
        run = load_run(folder, show_text=show_text)
        write_whole(folder / "report.html", html_report(run))
        write_whole(folder / "report.md", markdown_report(run))
        write_interchange(run)
        if records:
            write_records(run)


def render_together(folders: Sequence[Path], out: Path) -> None:
    """Write one page that shows several runs side by side.

    Raises:
        ReportError, ResultError: as `render`.
    """
    runs = [load_run(folder, show_text=False) for folder in folders]
    page = (
        _environment()
        .get_template("side_by_side.html.j2")
        .render(
            names=names_of(runs),
            comparisons=compare_runs(runs),
            environments=environments(runs),
            style=Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
        )
    )
    write_whole(out, page)


def html_report(run: RunData) -> str:
    """The whole report as one page that loads nothing."""
    sections = [(section, context) for section in SECTIONS if (context := section.build(run)) is not None]
    return page("report.html.j2", run=run, answers=answers(run), sections=sections)


def page(template: str, **context: Any) -> str:
    """A page with the style and script of all our pages inside it."""
    script = (_TEMPLATES / "report.js").read_text(encoding="utf-8")
    return (
        _environment()
        .get_template(template)
        .render(
            **context,
            style=Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
            script=Markup(script),
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )


def markdown_report(run: RunData) -> str:
    """The summary for a pull request."""
    return _environment().get_template("report.md.j2").render(run=run, answers=answers(run))


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=lambda name: name is None or not name.endswith(".md.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "ms": text.ms,
        "num": text.number,
        "factor": text.factor,
        "percent": text.percent,
        "tau": text.tau,
        "seconds": text.seconds,
        "interval": text.interval,
        "words": text.words,
        "sh": lambda value: shlex.quote(str(value)),
        "config_label": text.config_label,
        "group_label": text.group_label,
        "load_label": text.load_label,
        "md": _markdown_text,
        "columns_of": _columns_of,
        "stage_seconds": charts.stage_seconds,
        "heat": heat_class,
        "log2": math.log2,
    }
    environment.globals |= {
        "value_text": text.value_text,
        "percent": text.percent,
        "DASH": text.DASH,
        "variant_names": text.VARIANT_NAMES,
    }
    environment.tests |= {
        "config_like": lambda value: isinstance(value, Mapping) and {"backend", "variant", "k"} <= value.keys()
    }
    return environment


def heat_class(speedup: float) -> str:
    """Colour step of a speed-up: p1..p4 above 1, n1..n4 below, `tie` within 3 %."""
    step = next((i for i, limit in enumerate((1.03, 1.15, 1.4, 1.8)) if max(speedup, 1 / speedup) < limit), 4)
    return "tie" if step == 0 else f"{'p' if speedup > 1 else 'n'}{step}"


def _columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """All keys of a list of objects, in order of appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))


def _markdown_text(value: Any) -> str:
    """Text that Markdown shows as it stands: no markup of its own, no table cell ended, no HTML."""
    escaped = str(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for mark in "\\`*_{}[]#|!":
        escaped = escaped.replace(mark, "\\" + mark)
    return " ".join(escaped.split())
