"""The options of the main job, ``tune.py --trace FILE``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import click
import typer

from commands.report import log_to_mlflow
from harness import settings as st

_WORK, _ENGINE, _GRID, _SEARCH, _OUT = "Workload", "Engine and models", "What to try", "Search", "Output"


def tune(
    context: typer.Context,
    trace: Annotated[
        list[str] | None, typer.Option(help="Trace file; repeat for more, each gets its own decision.", rich_help_panel=_WORK)
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="Format of the traces instead of the detected one.", rich_help_panel=_WORK)
    ] = None,
    window: Annotated[
        str | None, typer.Option(help="Part of the trace to use, in seconds: 0-300.", rich_help_panel=_WORK)
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Use at most N requests.", min=1, rich_help_panel=_WORK)] = None,
    thin: Annotated[
        float | None, typer.Option(help="Keep this share of the requests, arrivals' shape kept.", rich_help_panel=_WORK)
    ] = None,
    time_scale: Annotated[
        float, typer.Option(help="Multiply arrival times: 0.5 sends twice as fast.", rich_help_panel=_WORK)
    ] = 1.0,
    jitter: Annotated[
        float | None, typer.Option(help="Spread arrivals that the source rounded, by up to S seconds.", rich_help_panel=_WORK)
    ] = None,
    time_unit: Annotated[
        str | None, typer.Option(help="Unit of the trace's times: s, ms, us, ns.", rich_help_panel=_WORK)
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="Text for a trace that has only lengths: chat, code, reasoning, grounded, or a file.", rich_help_panel=_WORK
        ),
    ] = None,
    max_output_tokens: Annotated[
        int | None, typer.Option(help="Cut every answer at N tokens.", min=2, rich_help_panel=_WORK)
    ] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="Engine to measure; repeat for more (default: reference).", rich_help_panel=_ENGINE)
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(help="Measure a server that already runs: off=URL, eagle3=URL; repeat.", rich_help_panel=_ENGINE),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(help="Name of the environment variable that holds the servers' API key.", rich_help_panel=_ENGINE),
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help="Where an engine lives: NAME=PYTHON_OR_COMMAND.", rich_help_panel=_ENGINE)
    ] = None,
    base_args: Annotated[
        list[str] | None,
        typer.Option(
            help="Your production flags, quoted: the baseline runs with them as they stand. With several backends: vllm='...'.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Target: hub id, directory, or 'demo' (SmolLM2-135M-Instruct).", rich_help_panel=_ENGINE)
    ] = "demo",
    draft: Annotated[
        list[str] | None,
        typer.Option(
            help="Draft checkpoint: VARIANT=ID_OR_PATH; draft_model=self-int4 drafts with the target's own int4 copy, "
            "VARIANT=demo with the head shipped for the demo model (its default).",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs per engine.", min=1, rich_help_panel=_ENGINE)] = 1,
    max_num_seqs: Annotated[
        int, typer.Option(help="The engine's cap on the batch, equal for off and on.", min=1, rich_help_panel=_ENGINE)
    ] = 64,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="Let the engine run code that comes with a checkpoint.", rich_help_panel=_ENGINE
        ),
    ] = False,
    variants: Annotated[
        str, typer.Option(help="Speculative variants, comma-separated. off is always measured.", rich_help_panel=_GRID)
    ] = "off,ngram",
    k: Annotated[str, typer.Option("--k", help="Draft tokens per step: 1..7 or 2,4,6.", rich_help_panel=_GRID)] = "2,4,6",
    batch_sizes: Annotated[
        str, typer.Option(help="Closed-loop concurrencies tried on one running server.", rich_help_panel=_GRID)
    ] = "1,4,16",
    quantization: Annotated[
        str, typer.Option(help="Weight quantizations; the first is the one you run.", rich_help_panel=_GRID)
    ] = "none",
    topk: Annotated[str, typer.Option(help="Tree widths for tree variants; 1 is a chain.", rich_help_panel=_GRID)] = "1",
    tree_nodes: Annotated[str, typer.Option(help="Nodes verified per step, for trees.", rich_help_panel=_GRID)] = "",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="KV cache types; the first is the one you run.", rich_help_panel=_GRID)
    ] = "auto",
    draft_quantization: Annotated[str, typer.Option(help="Weight quantizations of the draft.", rich_help_panel=_GRID)] = "none",
    max_quality_loss: Annotated[
        float,
        typer.Option(
            help="A quantization you do not run may win only within this loss, 1 - greedy agreement.",
            min=0,
            max=1,
            rich_help_panel=_GRID,
        ),
    ] = 0.0,
    space: Annotated[
        Path | None, typer.Option(help="YAML file with axes of the grid; they replace these options.", rich_help_panel=_GRID)
    ] = None,
    strategy: Annotated[str, typer.Option(help=" | ".join(st.STRATEGIES), rich_help_panel=_SEARCH)] = "funnel",
    objective: Annotated[
        list[str] | None,
        typer.Option(help=" | ".join(st.OBJECTIVES) + "; repeat for a Pareto search.", rich_help_panel=_SEARCH),
    ] = None,
    slo: Annotated[str | None, typer.Option(help="Limits: ttft_p95=500ms,tpot_p95=40ms.", rich_help_panel=_SEARCH)] = None,
    budget: Annotated[str | None, typer.Option(help="Time for the whole run: 30m.", rich_help_panel=_SEARCH)] = None,
    max_trials: Annotated[
        int | None, typer.Option(help="Search at most N (configuration, batch size) cells.", min=1, rich_help_panel=_SEARCH)
    ] = None,
    search_requests: Annotated[int, typer.Option(help="Requests of a search load.", min=2, rich_help_panel=_SEARCH)] = 24,
    confirm_requests: Annotated[
        int, typer.Option(help="Requests of a confirmation load (medians need 60).", min=2, rich_help_panel=_SEARCH)
    ] = 80,
    replays: Annotated[
        int,
        typer.Option(
            help="Replays of the trace's own load, for each finalist and off; from 5 on they give intervals.",
            min=1,
            rich_help_panel=_SEARCH,
        ),
    ] = 1,
    seed: Annotated[int, typer.Option(help="Seed of sampling, search and sub-sampling.", rich_help_panel=_SEARCH)] = 0,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print server starts, minutes and cost, and stop.", rich_help_panel=_SEARCH)
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Run directory; the same directory again resumes it.", rich_help_panel=_OUT)
    ] = None,
    probe: Annotated[
        list[str] | None,
        typer.Option(help="interference: measure what long prompts cost those that decode meanwhile.", rich_help_panel=_SEARCH),
    ] = None,
    gpu_hourly_usd: Annotated[
        float | None, typer.Option(help="Price of one GPU hour, for cost figures.", min=0, rich_help_panel=_OUT)
    ] = None,
    storage: Annotated[
        str | None, typer.Option(help="Optuna storage URL instead of a journal in the run directory.", rich_help_panel=_OUT)
    ] = None,
    mlflow: Annotated[
        str | None, typer.Option(help="MLflow tracking URI that gets the finished run (extra 'mlflow').", rich_help_panel=_OUT)
    ] = None,
    executor: Annotated[
        str | None,
        typer.Option(
            help="Measure several servers of the search at once: local (all GPUs of this host), ray (a Ray cluster).",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(help="Address of the Ray cluster (default: the one this host is part of).", rich_help_panel=_SEARCH),
    ] = None,
) -> None:
    if context.invoked_subcommand:
        return
    if not trace:
        raise click.UsageError("--trace FILE is needed; python tune.py --help lists the options")
    axes = {
        "variants": st.parse_names(variants),
        "k": st.parse_numbers("--k", k),
        "topk": st.parse_numbers("--topk", topk),
        "tree_nodes": st.parse_numbers("--tree-nodes", tree_nodes) if tree_nodes else (),
        "batch_sizes": st.parse_numbers("--batch-sizes", batch_sizes),
        "quantization": st.parse_names(quantization),
        "kv_cache_dtype": st.parse_names(kv_cache_dtype),
        "draft_quantization": st.parse_names(draft_quantization),
        **(st.read_space(space) if space else {}),
    }
    settings = st.RunSettings(
        traces=tuple(trace),
        out=str(out or _default_out(trace[0])),
        backends=tuple(backend or ["reference"]),
        engines={
            name: st.parse_command("--engine", command) for name, command in st.parse_pairs("--engine", engine or []).items()
        },
        endpoints=_endpoints(endpoint or []),
        api_key_env=api_key_env,
        base_args=st.parse_base_args(base_args or [], backend or ["reference"]),
        model=model,
        drafts=st.parse_pairs("--draft", draft or []),
        **axes,
        tensor_parallel=tensor_parallel,
        max_num_seqs=max_num_seqs,
        max_quality_loss=max_quality_loss,
        strategy=strategy,
        objectives=tuple(objective or ()),
        slo=st.parse_slo(slo) if slo else {},
        budget_s=st.parse_duration("--budget", budget) if budget else None,
        max_trials=max_trials,
        seed=seed,
        search_requests=search_requests,
        confirm_requests=confirm_requests,
        replays=replays,
        max_output_tokens=max_output_tokens,
        format=format,
        window=st.parse_window(window) if window else None,
        limit=limit,
        thin=thin,
        time_scale=time_scale,
        jitter_s=jitter,
        time_unit=time_unit,
        prompts=prompts,
        probes=tuple(probe or ()),
        gpu_hourly_usd=gpu_hourly_usd,
        storage=storage,
        executor=executor,
        ray_address=ray_address,
        trust_remote_code=trust_remote_code,
    )
    from harness.job import print_plan, run_job  # after the options are known to be right: this imports the libraries

    if plan:
        print_plan(settings)
        return
    if mlflow:
        from reports.mlflow_log import open_experiment

        open_experiment(mlflow)  # a wrong URI is told now and not after the run
    run_job(settings, lambda directory: _render(directory, mlflow))


def _render(directory: Path, mlflow: str | None) -> None:
    from reports import render  # brings matplotlib: only when there is a run to draw

    render(directory)
    if mlflow:
        log_to_mlflow(directory, mlflow)


def _endpoints(items: list[str]) -> dict[str, str]:
    """off=URL, eagle3=URL; a bare URL is off."""
    from backends.endpoints import parse_endpoint

    pairs = [parse_endpoint(item) for item in items]
    return {name or "off": url for name, url in pairs}


def _default_out(trace: str) -> Path:
    return Path("runs") / f"{Path(trace).name.split('.')[0]}-{time.strftime('%Y%m%d-%H%M%S')}"
