"""``python -m backends.simulated --world FILE_OR_PRESET --port P``: the simulated engine as an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from typing import BinaryIO

from fastapi.responses import PlainTextResponse

from backends.openai_server import create_app, listen, serve
from backends.simulated.dialects import DIALECTS
from backends.simulated.engine import SimulatedEngine
from backends.simulated.faults import FAULTS, find, parse_fault
from backends.simulated.truth import TruthLog
from backends.simulated.wire import Wire
from backends.simulated.world import World, load_world, with_limits
from backends.types import VARIANTS, ConfigError


def arguments() -> argparse.ArgumentParser:
    faults = "\n".join(
        f"  {name}{'' if default is None else f'={default:g}'}: {text}" for name, (default, text) in FAULTS.items()
    )
    parser = argparse.ArgumentParser(
        prog="python -m backends.simulated",
        description="An engine whose truth is known, as an OpenAI-compatible server in real time.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"faults (--fault NAME[=VALUE][@N]), with their default values:\n{faults}",
    )
    parser.add_argument("--world", required=True, help="preset name or JSON file")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--model", default="simulated", help="name that requests carry")
    parser.add_argument("--variant", default="off", choices=VARIANTS)
    parser.add_argument("--k", type=int, default=0, help="draft tokens a step")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--no-chunked-prefill", action="store_true")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--dialect", default="spectune", choices=DIALECTS, help="whose statistics page to show")
    parser.add_argument("--replicas", type=int, default=1, help="engines behind this server (data parallel)")
    parser.add_argument("--fault", action="append", default=[], metavar="NAME[=VALUE][@N]")
    parser.add_argument("--truth", metavar="FILE", help="append what really happened, one JSON line for each request")
    parser.add_argument("--startup", type=float, metavar="SECONDS", help="seconds until ready (default: the world's)")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def configured(args: argparse.Namespace) -> World:
    """The world under the limits that the command line sets.

    Raises:
        ConfigError: no such world, or it lacks the variant.
    """
    world = load_world(args.world)
    if args.max_num_seqs is not None:
        world = with_limits(world, max_num_seqs=args.max_num_seqs)
    if args.no_chunked_prefill:
        world = with_limits(world, chunked_prefill=False)
    if args.no_prefix_caching:
        world = with_limits(world, prefix_caching=False)
    if args.startup is not None:
        world = replace(world, startup_s=args.startup)
    reason = world.check(args.variant, args.k)
    if reason:
        raise ConfigError(reason)
    return world


def main() -> None:
    args = arguments().parse_args()
    try:
        world = configured(args)
        faults = tuple(parse_fault(text) for text in args.fault)
        truth: BinaryIO | None = open(args.truth, "ab") if args.truth else None  # noqa: SIM115  # open for the server's life
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    if find(faults, "crash_loading"):
        time.sleep(world.startup_s)
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (simulated)", file=sys.stderr)
        raise SystemExit(1)
    dialect = DIALECTS[args.dialect]
    log = TruthLog(truth)
    engine = SimulatedEngine(
        world,
        variant=args.variant,
        k=args.k,
        model=args.model,
        dialect=dialect,
        replicas=args.replicas,
        faults=faults,
        seed=args.seed,
        log=log,
    )
    app = create_app(engine)
    app.add_api_route("/reset_prefix_cache", engine.reset_prefix_cache, methods=["POST"])
    if dialect.path != "/metrics":
        app.add_api_route(dialect.path, lambda: PlainTextResponse(engine.statistics_page()))
    settings = {
        "world": world.name,
        "variant": args.variant,
        "k": args.k,
        "max_num_seqs": world.limits.max_num_seqs,
        "kv_capacity_tokens": world.limits.kv_capacity_tokens * args.replicas,
        "faults": args.fault,
    }
    print(f"simulated engine: {json.dumps(settings)}", flush=True)
    # asyncio's own loop writes to the socket at once; uvloop would gather writes to the end of its turn, past the logged time.
    serve(Wire(app, log, faults), listen(args.host, args.port), loop="asyncio")


if __name__ == "__main__":
    main()
