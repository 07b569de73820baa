"""Asks SGLang's own argument parser what it makes of command lines. Runs in SGLang's environment, not in the project's.

Reads a JSON list of argument lists from stdin and writes one object for each: {"resolved": {...}} or {"error": "..."}.
"""

import json
import sys
from typing import Any

from sglang.srt.arg_groups.field_order import POSITIONAL_FIELD_ORDER
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.server_args import prepare_server_args


def resolve(argv: list[str]) -> dict[str, Any]:
    try:
        args = prepare_server_args(argv)
        args.resolve_once()
        view = resolved_view(args)
    except SystemExit as error:  # argparse has printed why to stderr
        return {"error": f"exit {error.code}"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    names = [name for name in POSITIONAL_FIELD_ORDER if not name.startswith("_")]
    return {"resolved": json.loads(json.dumps({name: getattr(view, name) for name in names}, default=str))}


if __name__ == "__main__":
    answers = [resolve(argv) for argv in json.load(sys.stdin)]
    print("\n" + json.dumps(answers))
