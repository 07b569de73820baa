"""`python -m backends.reference --model DIR --port P`: serve one model. Exit code 2 and one line on stderr for bad input."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from backends.matchers import DEFAULT_MAX_N, DEFAULT_MIN_N
from backends.openai_server import create_app, listen, serve
from backends.reference.options import KV_CACHE_DTYPES, QUANTIZATIONS, SAMPLINGS, VARIANTS, EngineOptions
from backends.types import ConfigError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{message} (see --help)", file=sys.stderr)
        raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m backends.reference", description="Serve a model with the reference engine.")
    add = parser.add_argument
    add("--model", type=Path, required=True, help="model directory in Hugging Face layout")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--served-model-name", help="name that requests carry (default: the directory's name)")
    add("--variant", default="off", choices=VARIANTS)
    add("--k", type=int, default=0, help="draft tokens per step")
    add("--topk", type=int, default=1, help="above 1: draft a tree of this width and depth K")
    add("--num-draft-tokens", type=int, help="nodes of the tree that are verified, the last token included")
    add("--draft", help="directory of the draft model or head; self-int4 for draft_model")
    add("--draft-quantization", default="none", choices=QUANTIZATIONS)
    add(
        "--quantization",
        default="none",
        choices=QUANTIZATIONS,
        help="of the target's weights; none for AWQ and GPTQ checkpoints",
    )
    add("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    add("--sampling", default="coupled", choices=SAMPLINGS, help="verification rule for sampled requests")
    add("--max-num-seqs", type=int, default=64)
    add("--max-model-len", type=int, help="longest prompt plus output (default: the model's context)")
    add("--max-num-batched-tokens", type=int, default=512, help="prompt tokens plus decoding sequences of one step")
    add("--chunked-prefill", action=argparse.BooleanOptionalAction, default=True)
    add("--prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="copy what prompts have in common")
    add("--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES, help="auto: the model's dtype")
    add("--kv-cache-tokens", type=int, help="capacity of the KV cache (default: a quarter of the memory)")
    add("--ngram-min", type=int, default=DEFAULT_MIN_N)
    add("--ngram-max", type=int, default=DEFAULT_MAX_N)
    add("--k-schedule", type=_schedule, default=(), metavar="JSON", help="K by batch size: [[first, last, K], ...]")
    add(
        "--forced-acceptance",
        type=_rates,
        default=(),
        metavar="R1,R2,...",
        help="accept drafts at these rates: text is worthless",
    )
    add("--step-log", type=Path, help="write one JSON line a step to this file")
    return parser


def _schedule(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(entry) for entry in json.loads(text))


def _rates(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, EngineOptions]:
    """Raises ConfigError for settings that contradict each other, and leaves with 2 for an unknown or malformed one."""
    args = _parser().parse_args(argv)
    return args, EngineOptions(**{field.name: getattr(args, field.name) for field in fields(EngineOptions)})


def main(argv: list[str] | None = None) -> None:
    try:
        args, options = parse(argv)
        socket = listen(args.host, args.port)
        from backends.reference.engine import Engine
        from backends.reference.service import Service

        engine = Engine(options)
        for note in engine.weight_notes:
            print(f"weights: {note}", file=sys.stderr)
        for note in engine.draft_notes:
            print(f"draft: {note}", file=sys.stderr)
        service = Service(engine, args.served_model_name or args.model.resolve().name)
    except ConfigError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    app = create_app(service)
    app.add_api_route("/reset_prefix_cache", service.reset_prefix_cache, methods=["POST"])
    serve(app, socket)


if __name__ == "__main__":
    main()
