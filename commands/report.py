"""The options of ``tune.py report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click
import typer

from backends.types import ConfigError


def report(
    directories: Annotated[list[Path] | None, typer.Argument(help="Run directories that finished.")] = None,
    out: Annotated[Path, typer.Option(help="With several directories: the page that shows them side by side.")] = Path(
        "runs-side-by-side.html"
    ),
    records: Annotated[
        bool, typer.Option("--records", help="Also write all requests as one table: interchange/records.parquet and .csv.")
    ] = False,
    history: Annotated[
        Path | None, typer.Option(help="Folder of gates: draw every gate.json below it as one trend page, history.html.")
    ] = None,
    mlflow: Annotated[str | None, typer.Option(help="MLflow tracking URI that gets the runs too (extra 'mlflow').")] = None,
) -> None:
    """Write report.html and report.md again from finished run directories (of several also one page side by side), or a trend
    page over stored gates."""
    from harness.result_schema import ResultError
    from reports import ReportError, render, render_history, render_together

    folders = directories or []
    if not folders and not history:
        raise click.UsageError("name run directories, or --history FOLDER")
    try:
        render(folders, records=records)
        if len(folders) > 1:
            render_together(folders, out)
        if history:
            typer.echo(f"history: {render_history(history)}")
    except (ReportError, ResultError) as error:
        raise ConfigError(str(error)) from None
    for folder in folders:
        typer.echo(f"report: {folder / 'report.html'}")
        if mlflow:
            log_to_mlflow(folder, mlflow)
    if len(folders) > 1:
        typer.echo(f"side by side: {out}")


def log_to_mlflow(directory: Path, uri: str) -> None:
    """Log a finished run directory, once for each result."""
    from reports.mlflow_log import log_run

    run_id = log_run(directory, uri)
    typer.echo(f"mlflow: run {run_id}" if run_id else "mlflow: this result is there already")
