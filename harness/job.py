"""From settings to a finished run directory: load what the user named, refuse what cannot work, run, render."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from backends.endpoints import connect
from backends.findings import Finding
from backends.preflight import preflight
from backends.reference.tokenizer import Tokenizer
from backends.types import BackendError, ConfigError, WorkloadFacts
from harness.context import check_lengths, output_limit
from harness.environment import environment
from harness.executors import open_slots
from harness.plan import estimate, funnel_cells
from harness.progress import RunProgress
from harness.run import Parts, Run, split
from harness.search import visits
from harness.settings import RunSettings
from harness.space import Space, build_space, endpoint_space
from harness.store import RunStore
from workloads.load import load_trace
from workloads.prompts import POOLS, attach_prompts
from workloads.select import jitter, thin
from workloads.types import Trace, WorkloadError


@dataclass(frozen=True, slots=True)
class Job:
    """Everything a run needs, checked, before anything is started or written."""

    settings: RunSettings
    traces: Mapping[str, Trace]
    parts: Mapping[str, Parts]
    space: Space
    findings: tuple[Finding, ...]


def prepare(settings: RunSettings) -> Job:
    """Load traces and models and check them against each other. Starts and writes nothing.

    Raises:
        WorkloadError, ConfigError: what cannot work, in one line.
    """
    settings = replace(settings, model=resolve_model(settings.model), drafts=resolve_drafts(settings))
    if settings.executor == "ray":  # whose workers run in another folder
        settings = with_absolute_paths(settings)
    traces = load_traces(settings)
    parts = {name: split(trace, settings) for name, trace in traces.items()}
    for name, trace in traces.items() if set(settings.backends) != {"simulated"} else ():  # whose model is a world
        used = sorted({*parts[name].search, *parts[name].confirm})
        check_lengths(settings.model, name, trace.select(used).requests(), settings.max_output_tokens)
    facts = facts_of(traces, settings.max_output_tokens)
    if settings.endpoints:
        space = endpoint_space(settings, connect(settings.endpoints["off"], api_key_env=settings.api_key_env).backend)
        return Job(settings, traces, parts, space, ())
    space = build_space(settings, settings.model, facts)
    if not space.offs:
        raise ConfigError(f"nothing can run: {space.infeasible[0][1]}")
    outputs = [r.output_text for trace in traces.values() for r in trace.requests() if r.output_text]
    return Job(settings, traces, parts, space, check_models(space, facts, outputs))


def check_models(space: Space, facts: WorkloadFacts, outputs: Sequence[str] = ()) -> tuple[Finding, ...]:
    """Preflight of one configuration of each draft.

    Raises:
        ConfigError: a finding of level error, such as a draft with another tokenizer.
    """
    one_each = {(c.backend, c.variant, c.draft, c.draft_quantization, c.weight_quantization): c for c in space.servers}
    findings = dict.fromkeys(f for config in one_each.values() for f in preflight(config, facts, outputs=outputs))
    for finding in findings:
        if finding.level == "error":
            raise ConfigError(finding.line())
    return tuple(findings)


def run_job(settings: RunSettings, render: Callable[[Path], None]) -> None:
    """Run the main job; `render` writes the report of the finished run directory.

    Raises:
        BackendError: not one baseline could be measured.
    """
    job = prepare(settings)
    out = Path(settings.out)
    store = RunStore(out)
    try:
        with RunProgress() as progress:
            requests = [request for trace in job.traces.values() for request in trace.requests()]
            slots, site = open_slots(job.settings, requests, store.servers_dir, progress.note)
            run = Run(job.settings, job.space, job.traces, job.parts, store, progress, slots, site)
            result = run.execute(job.findings, shlex.join(["python", *sys.argv]))
    finally:
        store.close()
    render(out)
    _say_result(result, out)
    if not any(trial["state"] == "COMPLETE" and trial["role"] == "baseline" for trial in result["trials"]):
        first = next((t["reason"] for t in result["trials"] if t["state"] == "FAIL"), "no trial ran")
        raise BackendError(f"the baseline could not be measured: {first}")


def print_plan(settings: RunSettings) -> None:
    """Print what a run would start and take. Starts and writes nothing."""
    job = prepare(settings)
    funnel = settings.strategy == "funnel"
    most = settings.max_trials
    cells = funnel_cells(job.space, most) if funnel else visits(job.space, settings.strategy, most)
    plan = estimate(job.space, job.settings, job.traces, cells)
    gpus = len(environment()["gpu"])
    for line in plan.lines(settings.gpu_hourly_usd, gpus):
        print(line)
    for config, reason in job.space.infeasible:
        print(f"not run: {config.label()}: {reason}")


def load_traces(settings: RunSettings) -> dict[str, Trace]:
    """The chosen part of each trace, by name."""
    traces: dict[str, Trace] = {}
    for path in settings.traces:
        trace = load_trace(
            path, format=settings.format, time_unit=settings.time_unit, window=settings.window, limit=settings.limit
        )
        if settings.thin is not None:
            trace = thin(trace, settings.thin, seed=settings.seed)
        if settings.jitter_s is not None:
            trace = jitter(trace, settings.jitter_s, seed=settings.seed)
        if settings.prompts:
            trace = _with_prompts(trace, settings)
        if not trace.has_text:
            raise WorkloadError(
                f"{path}: holds lengths and no text; pair it with real prompts: --prompts {'|'.join(POOLS)} or a file"
            )
        if trace.name in traces:
            raise ConfigError(f"--trace {path}: another trace is called {trace.name} too; rename one")
        traces[trace.name] = trace
    return traces


def _with_prompts(trace: Trace, settings: RunSettings) -> Trace:
    """Prompts of the chosen pool at the recorded lengths, counted by the target's tokenizer."""
    tokenizer = Tokenizer(Path(settings.model))
    template = len(tokenizer.encode_chat([{"role": "user", "content": ""}]))
    return attach_prompts(
        trace,
        settings.prompts or "",
        lambda text: tokenizer.encode(text, special=False),
        seed=settings.seed,
        template_tokens=template,
    )


def resolve_model(model: str) -> str:
    """`demo` -> its directory, made on first use; anything else as it is."""
    if model != "demo":
        return model
    from backends.reference.demo_model import demo_model_dir

    return str(demo_model_dir())


def resolve_drafts(settings: RunSettings) -> dict[str, str]:
    """Drafts by variant: `demo` is the head that is shipped for the demo model, which is also what the demo model gets unasked.

    Raises:
        ConfigError: no such head is shipped.
    """
    drafts = dict(settings.drafts)
    if settings.model == "demo" and not settings.endpoints:
        takes = settings.takes_draft
        drafts |= {variant: "demo" for variant in settings.variants if variant in takes and variant not in drafts}
    return {variant: resolve_draft(variant, draft) for variant, draft in drafts.items()}


def resolve_draft(variant: str, draft: str) -> str:
    """`demo` -> the directory of the head shipped for the demo model, made on first use; anything else as it is."""
    if draft != "demo":
        return draft
    from backends.reference.demo_heads import demo_head_dir

    return str(demo_head_dir(variant))


def with_absolute_paths(settings: RunSettings) -> RunSettings:
    """The same with checkpoints and engines that lie on this host by their absolute paths."""

    def absolute(name: str) -> str:
        return str(Path(name).absolute()) if Path(name).exists() else name

    return replace(
        settings,
        model=absolute(settings.model),
        drafts={variant: absolute(draft) for variant, draft in settings.drafts.items()},
        engines={name: (absolute(command[0]), *command[1:]) for name, command in settings.engines.items()},
    )


def facts_of(traces: Mapping[str, Trace], max_output_tokens: int | None) -> WorkloadFacts:
    """What adapters may know of the workload."""
    requests = [request for trace in traces.values() for request in trace.requests()]
    return WorkloadFacts(
        max_input_tokens=max((r.input_tokens for r in requests if r.input_tokens is not None), default=None),
        max_output_tokens=max((limit for r in requests if (limit := output_limit(r, max_output_tokens))), default=None),
        sampling_parameters=frozenset(name for r in requests for name in r.sampling),
        structured_output=any(r.response_format for r in requests),
        tools=any(r.tools for r in requests),
    )


def _say_result(result: Mapping[str, Any], out: Path) -> None:
    console = Console()
    for decision in result["decisions"]:
        console.print(f"{decision['trace']}: {decision['verdict'].replace('_', ' ')}", style="bold", markup=False)
        for line in [*decision["reasons"], *(f"warning: {w}" for w in decision["warnings"])]:
            console.print(f"  {line}", markup=False, highlight=False)
        if decision["launch"]:
            console.print(f"  run: {decision['launch']['command']}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"report: {out / 'report.html'}", markup=False, highlight=False, soft_wrap=True)
