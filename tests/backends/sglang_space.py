"""A seeded sample of every command line that the search space can produce for SGLang, on a GPU and on a CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

from backends import sglang
from backends.types import ServingConfig, WorkloadFacts

MODELS = "/models"  # stands for the folder in which the engine test writes small checkpoint configurations
BASE_ARGS = {
    "cuda": ("--device", "cuda"),
    "cpu": ("--device", "cpu", "--max-total-tokens", "8192", "--context-length", "2048"),
}
PORT = 8123
COMMAND = ("sglang", "serve")  # a program that is not there: its version is assumed
_SHAPES = tuple(
    (k, topk, nodes)
    for k, topk in product((1, 2, 3, 5, 8, 16), (1, 2, 4))
    for nodes in ((None,) if topk == 1 else (None, k + 1, 2 * k + 1, 12, 32, 64))
)
_DRAFTS = {"draft_model": "draft", "eagle2": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
_SCHEDULES: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {"adaptive": True},
    {"k_schedule": [[1, 8, 5], [9, 32, 2], [33, 256, 0]]},
)


def _all(variant: str) -> Iterator[ServingConfig]:
    shapes = ((0, 1, None),) if variant == "off" else _SHAPES
    axes: tuple[tuple[Any, ...], ...] = (
        shapes, ("none", "fp8"), ("auto", "fp8", "fp8_e5m2", "bf16"), (4, 64, 200), (1, 2), (True, False), (True, False),
        ("none", "fp8") if variant in _DRAFTS else ("none",), _SCHEDULES,
    )  # fmt: skip
    for (k, topk, nodes), weights, kv, cap, parallel, chunked, prefix, draft_weights, schedule in product(*axes):
        yield ServingConfig(
            backend="sglang",
            model=f"{MODELS}/{'mtp_target' if variant == 'mtp' else 'target'}",
            variant=variant,
            k=k,
            topk=topk,
            num_draft_tokens=nodes,
            draft=f"{MODELS}/{_DRAFTS[variant]}" if variant in _DRAFTS else None,
            draft_quantization=draft_weights,
            weight_quantization=weights,
            kv_cache_dtype=kv,
            tensor_parallel=parallel,
            max_num_seqs=cap,
            chunked_prefill=chunked,
            prefix_caching=prefix,
            extra=schedule,
        )


def sampled(device: str, per_variant: int = 18) -> list[ServingConfig]:
    """`per_variant` configurations of each variant that the adapter allows on `device`, always the same ones."""
    chosen: list[ServingConfig] = []
    for variant in sorted(sglang.VARIANTS - (sglang.CUDA_ONLY if device == "cpu" else frozenset())):
        allowed = [config for config in _all(variant) if sglang.supports(config, WorkloadFacts()) is None]
        chosen += random.Random(f"{device} {variant}").sample(allowed, min(per_variant, len(allowed)))
    return chosen


def arguments(config: ServingConfig, device: str) -> list[str]:
    """What follows the program's name on the command line."""
    launch = sglang.launch(config, port=PORT, command=COMMAND, base_args=BASE_ARGS[device])
    return list(launch.argv[len(COMMAND) :])


def asked(argv: list[str]) -> dict[str, str | bool]:
    """Flags of `argv` by SGLang's field names, with their text; True for a flag without a value."""
    out: dict[str, str | bool] = {}
    for flag, value in zip(argv, [*argv[1:], "--"], strict=True):
        if flag.startswith("--"):
            name = flag.removeprefix("--").replace("-", "_")
            name = {"tensor_parallel_size": "tp_size"}.get(name, name)
            out[name] = True if value.startswith("--") else value
    return out


def rewritten(argv: list[str], resolved: dict[str, Any]) -> dict[str, tuple[str | bool, Any]]:
    """Flags whose resolved value is not the one asked for. `unquant` asks for none, which is how it resolves."""
    expected = {name: "None" if value == "unquant" else value for name, value in asked(argv).items()}
    return {name: (value, resolved[name]) for name, value in expected.items() if str(resolved[name]) != str(value)}
