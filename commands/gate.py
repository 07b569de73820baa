"""The options of ``tune.py gate``."""

from __future__ import annotations

from typing import Annotated

import typer


def gate(
    baseline: Annotated[str | None, typer.Option(help="baseline.json, an endpoint URL, or quoted tune options.")] = None,
    candidate: Annotated[str | None, typer.Option(help="An endpoint URL, or quoted tune options.")] = None,
    record: Annotated[str | None, typer.Option(help="Measure --baseline and write it to FILE.")] = None,
    trace: Annotated[str | None, typer.Option(help="Trace to replay (default: the bundled sample).")] = None,
    profile: Annotated[str, typer.Option(help="pr or nightly.")] = "pr",
    budget: Annotated[str | None, typer.Option(help="Time for the whole gate: 5m.")] = None,
    out: Annotated[str, typer.Option(help="Folder for junit.xml, gate.json, gate.md.")] = "runs/gate",
    band: Annotated[float, typer.Option(help="Change that matters in practice.", min=0.001, max=1)] = 0.03,
    acceptance_band: Annotated[float, typer.Option(help="Change of tau that matters.", min=0.001, max=1)] = 0.02,
    lossless: Annotated[bool, typer.Option(help="Whether both sides must give the same greedy text.")] = True,
    endpoint_backend: Annotated[str, typer.Option(help="Engine behind an endpoint URL.")] = "vllm",
    batch_sizes: Annotated[str | None, typer.Option(help="Closed-loop concurrencies.")] = None,
    requests: Annotated[int | None, typer.Option(help="Requests of a load.", min=2)] = None,
    max_output_tokens: Annotated[int | None, typer.Option(help="Cut every answer at N tokens.", min=2)] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling and order.")] = 0,
) -> int:
    """Compare two settings for a performance regression. Exit code 0 pass, 3 regression, 4 inconclusive."""
    from harness.gate.cli import gate as run_gate

    return run_gate(
        baseline=baseline,
        candidate=candidate,
        record=record,
        trace=trace,
        profile=profile,
        budget=budget,
        out=out,
        band=band,
        acceptance_band=acceptance_band,
        lossless=lossless,
        endpoint_backend=endpoint_backend,
        batch_sizes=batch_sizes,
        requests=requests,
        max_output_tokens=max_output_tokens,
        seed=seed,
    )
