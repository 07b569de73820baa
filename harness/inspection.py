"""`tune.py inspect` and `tune.py preflight`: what can be said of a trace and of checkpoints before any engine starts."""

from __future__ import annotations

from pathlib import Path

import orjson
from rich.console import Console

from backends.drafts import known_drafts
from backends.preflight import preflight
from backends.types import ServingConfig, WorkloadFacts
from harness.job import facts_of, resolve_draft, resolve_model
from harness.offline import pool
from harness.recorded import offline_acceptance
from workloads.load import load_trace
from workloads.profile import profile
from workloads.render import profile_svg, render_profile
from workloads.scrub import scrub


def inspect_trace(
    path: Path,
    *,
    as_json: bool,
    plot: Path | None,
    scrub_to: Path | None,
    model: str | None,
    format: str | None,
    time_unit: str | None,
) -> None:
    """Print a trace's profile. With `model`, n-gram and suffix acceptance on its recorded outputs too."""
    trace = load_trace(path, format=format, time_unit=time_unit)
    folder = Path(resolve_model(model)) if model else None
    parts = pool(offline_acceptance(trace, folder), by=("category",)) if folder else []
    acceptance = [found.to_dict() for found in parts]
    found = profile(trace, acceptance=acceptance)
    if as_json:
        print(orjson.dumps(found.to_dict(), option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY).decode())
    else:
        console = Console()
        for part in render_profile(found):
            console.print(part)
        if not folder and trace.known("output_text"):
            console.print("The trace holds outputs: add --model DIR for the acceptance that n-gram and suffix would have had.")
    if plot:
        plot.write_text(profile_svg(trace))
    if scrub_to:
        scrub(trace, scrub_to)


def print_preflight(
    model: str, drafts: dict[str, str], *, backend: str, k: int, trace: str | None, gpu_memory_gib: float | None
) -> int:
    """Print the findings for the target alone and with each draft; 1 where one is an error."""
    traces = {trace: load_trace(trace)} if trace else {}
    facts = facts_of(traces, None) if traces else WorkloadFacts()
    target = resolve_model(model)
    configs = [ServingConfig(backend=backend, model=target)]
    configs += [
        ServingConfig(backend=backend, model=target, variant=variant, k=k, draft=resolve_draft(variant, draft))
        for variant, draft in drafts.items()
    ]
    outputs = [r.output_text for t in traces.values() for r in t.requests() if r.output_text]
    memory = int(gpu_memory_gib * 2**30) if gpu_memory_gib else None
    console = Console()
    failed = False
    for config in configs:
        console.print(config.label(), style="bold")
        findings = preflight(config, facts, outputs=outputs, gpu_memory_bytes=memory)
        for finding in findings:
            console.print(f"  {finding.line()}", markup=False, highlight=False, soft_wrap=True)
        if not findings:
            console.print("  nothing found")
        failed |= any(finding.level == "error" for finding in findings)
    _print_known_drafts(console, model)
    return int(failed)


def _print_known_drafts(console: Console, model: str) -> None:
    known = known_drafts(model)
    if not known:
        return
    console.print(f"Published drafts for {known[0].target}", style="bold")
    for entry in known:
        where = f"--draft {entry.variant}={entry.draft}" if entry.draft else f"{entry.variant} in the target's own checkpoint"
        context = (
            f"trained on {entry.trained_context} tokens of context" if entry.trained_context else "trained context unknown"
        )
        line = f"  {where} ({entry.layout} layout, {context}; {entry.source})"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print("That a draft exists does not say that it is good on your traffic: measure it.")
