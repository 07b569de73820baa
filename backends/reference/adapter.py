"""What the harness needs to know of the reference engine. Imports no torch."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from backends.k_schedule import schedule_fault
from backends.reference.config import quantization_fault, read_config
from backends.reference.options import FP8_EMULATED, KV_CACHE_DTYPES, tree_fault
from backends.reference.options import QUANTIZATIONS as _QUANTIZATIONS
from backends.reference.options import VARIANTS as _VARIANTS
from backends.types import NEEDS_DRAFT, BackendError, ConfigError, Endpoint, Launch, ServingConfig, WorkloadFacts

NAME = "reference"
VARIANTS = frozenset(_VARIANTS)
QUANTIZATIONS = frozenset(_QUANTIZATIONS)
DEFAULT_COMMAND = (sys.executable,)
SAMPLING_PARAMETERS = frozenset({"temperature", "top_p", "top_k", "seed", "stop", "max_tokens", "ignore_eos"})

_CHECKOUT = Path(__file__).resolve().parents[2]


def supports(config: ServingConfig, facts: WorkloadFacts) -> str | None:
    """Why the engine cannot run `config` on such requests, in one line; None if it can."""
    if config.variant not in VARIANTS:
        return f"the reference engine has no variant {config.variant} (it has {', '.join(_VARIANTS)})"
    if config.weight_quantization not in QUANTIZATIONS or config.draft_quantization not in QUANTIZATIONS:
        return f"the reference engine quantizes to {', '.join(_QUANTIZATIONS)} only"
    if config.variant in NEEDS_DRAFT and config.draft is None:
        return f"{config.variant} needs a draft: a directory" + ", or self-int4" * (config.variant == "draft_model")
    if fault := schedule_fault(config):
        return fault
    if fault := tree_fault(config.variant, config.k, config.topk, config.num_draft_tokens):
        return fault
    if config.kv_cache_dtype not in KV_CACHE_DTYPES:
        return f"the reference engine has no KV-cache type '{config.kv_cache_dtype}', it has {', '.join(KV_CACHE_DTYPES)}"
    if config.tensor_parallel != 1:
        return "the reference engine runs on one device: tensor_parallel must be 1"
    unknown = sorted(facts.sampling_parameters - SAMPLING_PARAMETERS)
    if unknown:
        return f"the requests use {', '.join(unknown)}, which the reference engine does not have"
    if facts.structured_output:
        return "the requests ask for structured output, which the reference engine does not have"
    try:
        model = read_config(Path(config.model))
    except ConfigError as error:
        return str(error)
    if fault := quantization_fault(model, config.weight_quantization):
        return fault
    context = int(config.extra.get("max_model_len") or model.context_tokens)
    needed = (facts.max_input_tokens or 0) + (facts.max_output_tokens or 0)
    if needed > context:
        return f"the longest request needs {needed} tokens and the context holds {context}"
    return None


def launch(config: ServingConfig, *, port: int, command: tuple[str, ...], base_args: tuple[str, ...]) -> Launch:
    """`python -m backends.reference`, startable from any folder. `config.extra` gives flags: ngram_max=5 is `--ngram-max 5`;
    `k_schedule` is [[first, last, K], ...] by batch size, `forced_acceptance` a string of marginal rates."""
    argv = [*command, "-m", "backends.reference", "--model", config.model, "--port", str(port), "--variant", config.variant]
    argv += ["--k", str(config.k), "--max-num-seqs", str(config.max_num_seqs)]
    if config.topk > 1:
        argv += ["--topk", str(config.topk), "--num-draft-tokens", str(config.num_draft_tokens)]
    if config.draft is not None:
        argv += ["--draft", config.draft]
    argv += ["--draft-quantization", config.draft_quantization]
    argv += ["--quantization", config.weight_quantization]
    if config.kv_cache_dtype != "auto":  # revisions that a gate compares with may not have the flag
        argv += ["--kv-cache-dtype", config.kv_cache_dtype]
    argv.append("--chunked-prefill" if config.chunked_prefill else "--no-chunked-prefill")
    argv.append("--prefix-caching" if config.prefix_caching else "--no-prefix-caching")
    for name, value in config.extra.items():
        argv += [f"--{name.replace('_', '-')}", json.dumps(value) if name == "k_schedule" else str(value)]
    path = os.pathsep.join(filter(None, (str(_CHECKOUT), os.environ.get("PYTHONPATH"))))
    return Launch(
        argv=(*argv, *base_args),
        env={"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        served_model=Path(config.model).resolve().name,
        ready_timeout_s=300.0,
    )


def read_back(endpoint: Endpoint, config: ServingConfig, log: str) -> Endpoint:
    """Settings and KV capacity from the engine's /metrics page.

    Raises:
        BackendError: the page cannot be read.
    """
    try:
        with urllib.request.urlopen(f"{endpoint.base_url}/metrics", timeout=10) as response:
            page = response.read().decode()
    except OSError as error:
        raise BackendError(f"{endpoint.base_url}/metrics cannot be read: {error}") from None
    samples = {s.name: s for family in text_string_to_metric_families(page) for s in family.samples}
    settings = dict(samples["spectune:settings_info"].labels)
    asked = {
        "variant": config.variant,
        "k": str(config.k),
        "topk": str(config.topk),
        "quantization": config.weight_quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "max_num_seqs": str(config.max_num_seqs),
        "chunked_prefill": str(config.chunked_prefill),
        "prefix_caching": str(config.prefix_caching),
    }
    runs = {key: settings.get(key, value) for key, value in asked.items()}  # another revision may not know all of them
    warnings = tuple(f"asked for {key}={value}, runs {runs[key]}" for key, value in asked.items() if runs[key] != value)
    if settings["forced_acceptance"] != "()":
        warnings += (f"acceptance is forced to {settings['forced_acceptance']}: step costs are real, the text is not",)
    if FP8_EMULATED in settings.get("weight_notes", "") + settings["draft_notes"]:
        warnings += (FP8_EMULATED,)
    return replace(
        endpoint,
        version=settings.pop("version"),
        kv_cache_tokens=int(samples["spectune:kv_capacity_tokens"].value),
        resolved=settings,
        warnings=endpoint.warnings + warnings,
    )
