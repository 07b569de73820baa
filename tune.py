"""Tune speculative decoding on your own traffic: ``python tune.py --trace prod.jsonl``.

The command line: commands with their options from `commands/`, and errors as one line and an exit code (0 done, 1 the job or a check
failed, 2 usage or input error, 130 interrupted and resumable).
"""

from __future__ import annotations

import sys

import click
import typer

from backends.types import BackendError, ConfigError
from commands.engines import selftest, serve, verify_engine
from commands.gate import gate
from commands.looks import inspect, preflight
from commands.main_job import tune
from commands.report import report
from commands.train_head import train_head
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

app.callback(invoke_without_command=True)(tune)
for command in (report, inspect, preflight, gate, selftest):
    app.command()(command)
app.command("verify-engine")(verify_engine)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
app.command("train-head")(train_head)


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
