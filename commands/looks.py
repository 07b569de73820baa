"""The options of what starts no server: ``tune.py inspect`` and ``tune.py preflight``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness import settings as st


def inspect(
    trace: Annotated[Path, typer.Argument(help="Trace file.")],
    json: Annotated[bool, typer.Option("--json", help="Print plain data instead of tables.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a plot of arrivals and lengths (SVG).")] = None,
    scrub: Annotated[
        Path | None, typer.Option(help="Write a shareable copy: lengths, arrivals, prefix structure; no text.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model directory (or 'demo') whose tokenizer counts recorded outputs.")] = "",
    format: Annotated[str | None, typer.Option(help="Format of the trace instead of the detected one.")] = None,
    time_unit: Annotated[str | None, typer.Option(help="Unit of the trace's times: s, ms, us, ns.")] = None,
) -> None:
    """Show what a trace holds, and the acceptance that n-gram and suffix drafting would have had on it. Starts no engine."""
    from harness.inspection import inspect_trace

    inspect_trace(trace, as_json=json, plot=plot, scrub_to=scrub, model=model or None, format=format, time_unit=time_unit)


def preflight(
    model: Annotated[str, typer.Option(help="Target: directory, cached hub id, or 'demo'.")],
    draft: Annotated[list[str] | None, typer.Option(help="Draft checkpoint: VARIANT=ID_OR_PATH.")] = None,
    backend: Annotated[str, typer.Option(help="Engine that would run it.")] = "vllm",
    k: Annotated[int, typer.Option("--k", help="Draft tokens per step.", min=1)] = 4,
    trace: Annotated[str | None, typer.Option(help="Trace to check lengths and sampling parameters against.")] = None,
    gpu_memory_gib: Annotated[float | None, typer.Option(help="Memory of one GPU, to predict the KV cache.", min=1)] = None,
) -> int:
    """Check draft and target against each other without a GPU or a server. Exit code 1 where a check fails."""
    from harness.inspection import print_preflight

    drafts = st.parse_pairs("--draft", draft or [])
    return print_preflight(model, drafts, backend=backend, k=k, trace=trace, gpu_memory_gib=gpu_memory_gib)
