"""What the harness needs to know of the simulated engine. `config.model` is a world: a preset or a JSON file."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

from backends.simulated.presets import PRESETS
from backends.simulated.world import load_world
from backends.types import VARIANTS as ALL_VARIANTS
from backends.types import ConfigError, Endpoint, Launch, ServingConfig, WorkloadFacts

NAME = "simulated"
VARIANTS = frozenset(ALL_VARIANTS)  # which of them a world has, `supports` says
QUANTIZATIONS = frozenset({"none"})
DEFAULT_COMMAND = (sys.executable,)
SERVED_MODEL = "simulated"
SAMPLING_PARAMETERS = frozenset({"temperature", "top_p", "top_k", "seed", "stop", "max_tokens", "ignore_eos"})

_CHECKOUT = Path(__file__).resolve().parents[2]
_SETTINGS = re.compile(r"^simulated engine: (\{.*\})$", re.MULTILINE)


def supports(config: ServingConfig, facts: WorkloadFacts) -> str | None:
    """Why this world cannot run `config` on such requests, in one line; None if it can."""
    try:
        world = load_world(config.model)
    except ConfigError as error:
        return str(error)
    reason = world.check(config.variant, config.k)
    if reason:
        return reason
    if config.topk > 1:
        return "simulated drafts are chains: topk must be 1"
    if config.weight_quantization != "none" or config.draft_quantization != "none" or config.kv_cache_dtype != "auto":
        return "a world has one precision: describe another in a world of its own"
    if config.tensor_parallel != 1:
        return "a world is one machine: tensor_parallel must be 1"
    unknown = sorted(facts.sampling_parameters - SAMPLING_PARAMETERS)
    if unknown:
        return f"the requests use {', '.join(unknown)}, which the simulated engine does not have"
    if facts.structured_output:
        return "the requests ask for structured output, which the simulated engine does not have"
    needed = (facts.max_input_tokens or 0) + (facts.max_output_tokens or 0)
    room = min(world.limits.max_model_len, world.limits.kv_capacity_tokens)
    return f"the longest request needs {needed} tokens and the context holds {room}" if needed > room else None


def launch(config: ServingConfig, *, port: int, command: tuple[str, ...], base_args: tuple[str, ...]) -> Launch:
    """`python -m backends.simulated`, startable from any folder. `config.extra` gives flags: seed=3 is `--seed 3`."""
    world = config.model if config.model in PRESETS else str(Path(config.model).resolve())
    argv = [*command, "-m", "backends.simulated", "--world", world, "--model", SERVED_MODEL, "--port", str(port)]
    argv += ["--variant", config.variant, "--k", str(config.k), "--max-num-seqs", str(config.max_num_seqs)]
    if not config.chunked_prefill:
        argv.append("--no-chunked-prefill")
    if not config.prefix_caching:
        argv.append("--no-prefix-caching")
    for name, value in config.extra.items():
        argv += [f"--{name.replace('_', '-')}", str(value)]
    path = os.pathsep.join(filter(None, (str(_CHECKOUT), os.environ.get("PYTHONPATH"))))
    return Launch(
        argv=(*argv, *base_args),
        env={"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        served_model=SERVED_MODEL,
        ready_timeout_s=180.0 + load_world(config.model).startup_s,
    )


def read_back(endpoint: Endpoint, config: ServingConfig, log: str) -> Endpoint:
    """Settings and KV capacity from the line that the server prints when it starts."""
    found = _SETTINGS.search(log)
    if found is None:
        return replace(endpoint, warnings=(*endpoint.warnings, "the simulated server did not say its settings"))
    settings = json.loads(found[1])
    asked = {"variant": config.variant, "k": config.k, "max_num_seqs": config.max_num_seqs}
    wrong = tuple(f"asked for {key}={value}, runs {settings[key]}" for key, value in asked.items() if settings[key] != value)
    return replace(
        endpoint,
        version=settings["world"],
        kv_cache_tokens=settings["kv_capacity_tokens"],
        resolved=settings,
        warnings=endpoint.warnings + wrong,
    )
