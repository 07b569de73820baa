"""The options of ``tune.py selftest``, ``verify-engine`` and ``serve``: engines by themselves."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from backends.types import ConfigError
from harness import settings as st

CHECKOUT = Path(__file__).resolve().parents[1]


def selftest() -> int:
    """Measure simulated servers whose truth is known and print measured against true. Exit code 1 where a check fails.

    Reports of later runs on this machine show the outcome.
    """
    from harness.environment import environment
    from harness.selftest import as_table, keep
    from harness.selftest import selftest as run_selftest

    checks = run_selftest()
    keep(checks, environment()["fingerprint"])
    typer.echo(as_table(checks))
    return int(not all(check.passed for check in checks))


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


def serve(
    context: typer.Context,
    backend: Annotated[str, typer.Option(help="reference or simulated.")] = "reference",
    model: Annotated[str, typer.Option(help="Model directory, or 'demo', for the reference engine.")] = "demo",
) -> None:
    """Run the reference or simulated engine as an OpenAI-compatible server on 127.0.0.1; further options go to the engine."""
    from harness.job import resolve_model

    if backend not in ("reference", "simulated"):
        raise ConfigError(f"serve: --backend is reference or simulated, not '{backend}'")
    path = os.pathsep.join(filter(None, (str(CHECKOUT), os.environ.get("PYTHONPATH"))))
    arguments = ["--model", resolve_model(model), *context.args] if backend == "reference" else context.args
    os.execve(sys.executable, [sys.executable, "-m", f"backends.{backend}", *arguments], {**os.environ, "PYTHONPATH": path})
