"""Tune speculative decoding on your own traffic: ``python tune.py --trace prod.jsonl``.

The command line only: it turns options into `RunSettings` and errors into one line and an exit code (0 done, 1 the job or a
check failed, 2 usage or input error, 130 interrupted and resumable).
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import click
import typer

from backends.types import BackendError, ConfigError
from harness import settings as st
from workloads.types import WorkloadError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help=(
        "Replay your own trace against real LLM servers, search over speculative variant, K, batch size and quantization, and "
        "write a report that says, with evidence, whether to turn speculation on.\n\n"
        "Main job: [bold]python tune.py --trace prod.jsonl --backend vllm --model MODEL[/bold]"
    ),
)

INTERRUPTED = 130
_WORK, _ENGINE, _GRID, _SEARCH, _OUT = "Workload", "Engine and models", "What to try", "Search", "Output"


@app.callback(invoke_without_command=True)
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


@app.command()
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
            _log_to_mlflow(folder, mlflow)
    if len(folders) > 1:
        typer.echo(f"side by side: {out}")


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
def selftest() -> int:
    """Measure simulated servers whose truth is known and print measured against true. Exit code 1 where a check fails."""
    from harness.selftest import as_table
    from harness.selftest import selftest as run_selftest

    checks = run_selftest()
    typer.echo(as_table(checks))
    return int(not all(check.passed for check in checks))


@app.command("verify-engine")
def verify_engine(
    name: Annotated[str, typer.Argument(help="vllm, sglang, tensorrt_llm or reference.")],
    model: Annotated[str, typer.Option(help="Target: hub id, directory, or 'demo'.")] = "demo",
    engine: Annotated[str | None, typer.Option(help="Where it lives: PYTHON_OR_COMMAND.")] = None,
    variants: Annotated[str, typer.Option(help="Speculative variants, comma-separated.")] = "off,ngram",
    draft: Annotated[list[str] | None, typer.Option(help="Draft checkpoint: VARIANT=ID_OR_PATH.")] = None,
    k: Annotated[int, typer.Option("--k", help="Draft tokens per step.", min=1)] = 4,
    base_args: Annotated[str, typer.Option(help="Flags that the engine needs here, quoted.")] = "",
    out: Annotated[Path | None, typer.Option(help="Folder for the servers' logs.")] = None,
) -> int:
    """Start an engine with each variant; check streams, tau, losslessness and shutdown. Exit code 1 where a check fails."""
    settings = st.RunSettings(
        traces=(),
        out=str(out or Path("runs") / f"verify-{name}"),
        backends=(name,),
        engines={name: st.parse_command("--engine", engine)} if engine else {},
        base_args=st.parse_base_args([base_args], [name]),
        model=model,
        drafts=st.parse_pairs("--draft", draft or []),
        variants=st.parse_names(variants),
        k=(k,),
    )
    from harness.verify_engine import print_checks
    from harness.verify_engine import verify_engine as run_checks

    return print_checks(run_checks(settings, Path(settings.out)))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    backend: Annotated[str, typer.Option(help="reference or simulated.")] = "reference",
    model: Annotated[str, typer.Option(help="Model directory, or 'demo', for the reference engine.")] = "demo",
) -> None:
    """Run the reference or simulated engine as an OpenAI-compatible server on 127.0.0.1; further options go to the engine."""
    from harness.job import resolve_model

    if backend not in ("reference", "simulated"):
        raise ConfigError(f"serve: --backend is reference or simulated, not '{backend}'")
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    arguments = ["--model", resolve_model(model), *context.args] if backend == "reference" else context.args
    os.execve(sys.executable, [sys.executable, "-m", f"backends.{backend}", *arguments], {**os.environ, "PYTHONPATH": path})


@app.command("train-head")
def train_head(
    variant: Annotated[str, typer.Option(help="eagle3, eagle2, p_eagle, medusa, mtp or draft_model.")],
    prompts: Annotated[Path, typer.Option(help='Prompts to train on, one a line: {"prompt": ...} or {"messages": [...]}.')],
    out: Annotated[Path, typer.Option(help="Folder of the run; the same command again goes on where it stopped.")],
    model: Annotated[str, typer.Option(help="Target: directory, or 'demo'.")] = "demo",
    test_prompts: Annotated[
        list[Path] | None, typer.Option(help="Prompts of other kinds, only to measure acceptance on; repeat.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Where the target's outputs are kept, to be shared by several heads.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write the head in bf16 and its published layout, for other engines.")
    ] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the outputs.", min=0.01)] = 4.0,
    draft_vocab: Annotated[int, typer.Option(help="Tokens a head with a reduced vocabulary may draft.", min=16)] = 8192,
    learning_rate: Annotated[float, typer.Option(help="Peak of AdamW's learning rate.", min=0)] = 2.5e-3,
    weight_decay: Annotated[float, typer.Option(help="AdamW's weight decay.", min=0)] = 0.05,
    train_on_prompts: Annotated[
        bool,
        typer.Option("--train-on-prompts", help="Draft from positions in prompts too: twice the work, and twice the variety."),
    ] = False,
    start: Annotated[Path | None, typer.Option(help="EAGLE-3 head that a p_eagle head starts from.")] = None,
    k: Annotated[int, typer.Option("--k", help="Draft tokens per step in the simulated acceptance.", min=1)] = 4,
    max_tokens: Annotated[int, typer.Option(help="Cut each output of the target at N tokens.", min=3)] = 160,
    seed: Annotated[int, typer.Option(help="Seed of initialization and order.")] = 0,
) -> None:
    """Train a draft head for a model on its own outputs, and say what acceptance it reaches on prompts held out."""
    from backends.reference.training.command import Request, mask_token
    from backends.reference.training.command import train_head as run
    from backends.reference.training.train import Settings
    from harness.job import resolve_model

    folder = Path(resolve_model(model))
    settings = Settings(
        variant,
        epochs=epochs,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        draft_vocab=draft_vocab,
        seed=seed,
        k=k,
        mask_token=mask_token(folder),
        prompts=train_on_prompts,
        start=str(start or ""),
    )
    run(
        Request(
            model=folder,
            prompts=prompts,
            out=out,
            settings=settings,
            tests=test_prompts or (),
            data=data,
            export=export,
            max_tokens=max_tokens,
            command=shlex.join(["python", "tune.py", *sys.argv[1:]]),
        )
    )


def _render(directory: Path, mlflow: str | None) -> None:
    from reports import render  # brings matplotlib: only when there is a run to draw

    render(directory)
    if mlflow:
        _log_to_mlflow(directory, mlflow)


def _log_to_mlflow(directory: Path, uri: str) -> None:
    from reports.mlflow_log import log_run

    run_id = log_run(directory, uri)
    typer.echo(f"mlflow: run {run_id}" if run_id else "mlflow: this result is there already")


def _endpoints(items: list[str]) -> dict[str, str]:
    """off=URL, eagle3=URL; a bare URL is off."""
    from backends.endpoints import parse_endpoint

    pairs = [parse_endpoint(item) for item in items]
    return {name or "off": url for name, url in pairs}


def _default_out(trace: str) -> Path:
    return Path("runs") / f"{Path(trace).name.split('.')[0]}-{time.strftime('%Y%m%d-%H%M%S')}"


def main() -> int:
    """Run the command line; every expected failure is one line on stderr and an exit code."""
    try:
        code = app(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return 2
    except (ConfigError, WorkloadError) as error:
        print(f"tune.py: {error}", file=sys.stderr)
        return 2
    except BackendError as error:
        print(f"tune.py: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, click.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:  # typer turns Ctrl-C into this code by itself
        print("tune.py: interrupted; the same command with the same --out goes on where it stopped", file=sys.stderr)
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
