"""TensorRT-LLM: from a `ServingConfig` to `trtllm-serve` and its YAML file.

Written from the source of the PyTorch backend (`llmapi/llm_args.py` of 1.2 and of the main branch after it) and never executed
by this project: PyPI carries no build of it. `docs/engines.md` says how to verify it on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from backends import command_line as cli
from backends.http_client import call
from backends.installed import installed_version, parse_version, version_text
from backends.k_schedule import ranges, schedule_fault
from backends.types import NEEDS_DRAFT, ConfigError, Endpoint, Launch, ServingConfig, WorkloadFacts

NAME = "tensorrt_llm"
QUANTIZATIONS = frozenset({"none"})
"""Weights are quantized beforehand: the checkpoint says how, no option does."""
DEFAULT_COMMAND = ("trtllm-serve",)
SERVED_MODEL = "model"
READY_TIMEOUT_S = 3600.0  # loading, autotuning, and CUDA graphs for every batch size
ASSUMED_VERSION = (1, 2)  # the last stable series, where the version cannot be found out (a container)
OLDEST_VERSION = (1, 2)
MAIN = (1, 3)  # the main branch after 1.2: strict schema with one class for each decoding type
CONFIG_FILE = "llm_args.yaml"

# Variant -> decoding type and the first version with it.
_DECODING: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "ngram": ("NGram", OLDEST_VERSION),
    "suffix": ("SA", MAIN),
    "draft_model": ("Draft_Target", OLDEST_VERSION),
    "eagle3": ("Eagle3", OLDEST_VERSION),
    "mtp": ("MTP", OLDEST_VERSION),
    "dflash": ("DFlash", MAIN),
    "dspark": ("DSpark", MAIN),
}
VARIANTS = frozenset({"off", *_DECODING})
_TREES = frozenset({"eagle3", "mtp"})
_NO_OVERLAP = frozenset({"NGram", "Draft_Target"})  # their drafts need the step before to have ended
_KV_CACHE_DTYPES: Mapping[str, str] = {"auto": "auto", "fp8": "fp8", "fp8_e4m3": "fp8", "nvfp4": "nvfp4"}
_MISSING: Mapping[str, str] = {
    "medusa": "it left with the TensorRT backend, which serves an engine built for it",
    "eagle2": "the PyTorch backend reads every EAGLE head as EAGLE-3",
    "p_eagle": "it has no such decoding type",
}
_SPECIAL_EXTRA = frozenset({"k_schedule", "env", "parallel_drafting", "engine_version", "trust_remote_code"})
_ALIASES = {
    "tp": "tp-size",
    "tensor-parallel-size": "tp-size", "kv-cache-free-gpu-memory-fraction": "free-gpu-memory-fraction",
    "extra-llm-api-options": "config",
}  # fmt: skip
_OWN_FLAGS = {
    "host", "port", "served-model-name", "tp-size", "max-batch-size", "config", "free-gpu-memory-fraction", "kv-cache-dtype",
    "enable-chunked-prefill",
}  # fmt: skip
_KV_TOKENS = re.compile(r"max tokens in paged KV cache \((\d+)\)")


def supports(config: ServingConfig, facts: WorkloadFacts) -> str | None:
    """Why TensorRT-LLM cannot run `config`, in one line; None if it can. What depends on the version is refused by `launch`."""
    if config.variant not in VARIANTS:
        why = _MISSING.get(config.variant)
        return f"TensorRT-LLM has no variant '{config.variant}'" + (f": {why}" if why else "")
    if config.variant in NEEDS_DRAFT and not config.draft:
        return f"variant '{config.variant}' needs a draft checkpoint: give --draft {config.variant}=ID_OR_PATH"
    if config.draft and config.draft.startswith("self-"):
        return f"draft '{config.draft}' exists in the reference engine only"
    for what, name in (("weights", config.weight_quantization), ("draft weights", config.draft_quantization)):
        if name not in QUANTIZATIONS:
            return f"TensorRT-LLM cannot quantize {what} to '{name}' while loading: name a checkpoint that is quantized so"
    if config.kv_cache_dtype not in _KV_CACHE_DTYPES:
        return f"TensorRT-LLM has no KV-cache type '{config.kv_cache_dtype}', it has {', '.join(_KV_CACHE_DTYPES)}"
    if any(cli.flag(key) == "trust-remote-code" and value for key, value in config.extra.items()):
        return "remote code of a checkpoint is never run"
    return _shape_fault(config) or schedule_fault(config) or _schedule_limit(config)


def _shape_fault(config: ServingConfig) -> str | None:
    """Depth, width and nodes; `num_draft_tokens` counts the root, TensorRT-LLM's own number does not."""
    if config.variant == "off":
        return None
    nodes = config.num_draft_tokens
    if config.topk == 1:
        return (
            None if nodes in (None, config.k + 1) else f"with topk 1 a step verifies K + 1 = {config.k + 1} tokens, not {nodes}"
        )
    if config.variant not in _TREES:
        return f"TensorRT-LLM's {config.variant} drafts one chain: topk must be 1"
    if nodes is None:
        return "a tree (topk above 1) needs the number of nodes to verify: give --tree-nodes"
    most = config.topk * config.k + 1
    if not config.k + 1 <= nodes <= most:
        return f"a tree of depth {config.k} and width {config.topk} has {config.k + 1} to {most} nodes to verify, not {nodes}"
    return None


def _schedule_limit(config: ServingConfig) -> str | None:
    entries = ranges(config)
    if entries and config.variant == "off":
        return "a schedule of K by batch size without speculation"
    if entries and entries[0][2] != config.k:
        return f"the K schedule begins with K = {entries[0][2]}: TensorRT-LLM wants the configuration's K = {config.k} there"
    return None


def launch(config: ServingConfig, *, port: int, command: tuple[str, ...], base_args: tuple[str, ...]) -> Launch:
    """The `trtllm-serve` of `config` on 127.0.0.1:`port`. Its YAML file overrides its command line, so settings go there.

    `config.extra`: `k_schedule` ([[first, last, K], ...] by batch size), `parallel_drafting` (True: the draft model is a PARD
    model), `engine_version` ("1.3.0", for a container whose version cannot be asked), `env`; every other key is a key of the
    YAML file, mappings merged. A YAML file among `base_args` (`--config FILE`) is read and lies below all of it.

    Raises:
        ConfigError: the version lacks what `config` asks for, or `base_args` hold what must not be there or cannot be read.
    """
    version = _version(config, command)
    flags = cli.base_flags(base_args, _ALIASES)
    argv = [*command, config.model, "--host", "127.0.0.1", "--port", str(port)]
    if version >= MAIN:
        argv += ["--served_model_name", SERVED_MODEL]
    argv += ["--tp_size", str(config.tensor_parallel), "--max_batch_size", str(config.max_num_seqs)]
    argv += ["--config", "{folder}/" + CONFIG_FILE]
    for name, values in flags.items():
        if name not in _OWN_FLAGS:
            argv += [f"--{name.replace('-', '_')}", *values]
    document = merged(_base_document(flags), llm_args(config, version))
    return Launch(
        argv=tuple(argv),
        env={key: str(value) for key, value in config.extra.get("env", {}).items()},
        files={CONFIG_FILE: yaml.safe_dump(document, sort_keys=False)},
        served_model=SERVED_MODEL if version >= MAIN else config.model,
        ready_timeout_s=READY_TIMEOUT_S,
    )


def llm_args(config: ServingConfig, version: tuple[int, ...]) -> dict[str, Any]:
    """The YAML document of `config` for TensorRT-LLM `version`, every setting that a measurement depends on stated.

    Raises:
        ConfigError: that version has no such decoding type.
    """
    spec = speculative_config(config, version)
    document: dict[str, Any] = {
        "kv_cache_config": {"enable_block_reuse": config.prefix_caching, "dtype": _KV_CACHE_DTYPES[config.kv_cache_dtype]},
        "cuda_graph_config": {"max_batch_size": config.max_num_seqs, "enable_padding": True},
        "enable_chunked_prefill": config.chunked_prefill,
        "disable_overlap_scheduler": spec is not None and spec["decoding_type"] in _NO_OVERLAP,
        "enable_iter_perf_stats": True,  # acceptance counters and gauges
        "return_perf_metrics": True,  # mounts /prometheus/metrics
    }
    if spec is not None:
        document["speculative_config"] = spec
    return merged(document, {key: value for key, value in config.extra.items() if key not in _SPECIAL_EXTRA})


def speculative_config(config: ServingConfig, version: tuple[int, ...]) -> dict[str, Any] | None:
    """TensorRT-LLM's speculative config; None for off.

    Raises:
        ConfigError: `version` has no such decoding type, or no trees, or no schedule.
    """
    if config.variant == "off":
        return None
    kind, since = _DECODING[config.variant]
    if config.variant == "draft_model" and config.extra.get("parallel_drafting"):
        kind = "PARD"
    _require(version, since, f"variant '{config.variant}'")
    spec: dict[str, Any] = {"decoding_type": kind, "max_draft_len": config.k}
    if config.draft:
        spec["speculative_model"] = config.draft
    if kind == "NGram":
        spec |= {"max_matching_ngram_size": 4, "is_keep_all": True, "is_use_oldest": True, "is_public_pool": True}
    elif kind == "SA":
        spec |= {"max_matching_ngram_size": -1, "enable_global_pool": False}
    elif kind == "DSpark":
        spec["block_size"] = config.k
    elif kind == "MTP" and version < MAIN:
        spec["num_nextn_predict_layers"] = spec.pop("max_draft_len")
    if config.topk > 1 and config.num_draft_tokens is not None:
        _require(version, MAIN, "a draft tree")
        spec |= {"use_dynamic_tree": True, "dynamic_tree_max_topK": config.topk}
        spec["max_total_draft_tokens"] = config.num_draft_tokens - 1
    return spec | _schedule(config, version)


def _schedule(config: ServingConfig, version: tuple[int, ...]) -> dict[str, Any]:
    """K by batch size: a cut-off where that says it all, else the last batch size of each range -> K. Above the last: no drafts."""
    entries = ranges(config)
    if not entries:
        return {}
    first, last, k = entries[-1]
    entries[-1] = (first, max(last, config.max_num_seqs), k)  # what follows the last range goes on with its K
    while entries and entries[-1][2] == 0:
        entries.pop()
    if len(entries) == 1:
        return {"max_concurrency": entries[0][1]}
    _require(version, MAIN, "a schedule of more than one K by batch size")
    return {"draft_len_schedule": {end: k for _, end, k in entries}}


def _require(version: tuple[int, ...], since: tuple[int, ...], what: str) -> None:
    if version < since:
        newer = version_text(since) if since != MAIN else "a version after 1.2"
        raise ConfigError(f"{what} needs TensorRT-LLM {newer}, this is {version_text(version)}")


def _version(config: ServingConfig, command: tuple[str, ...]) -> tuple[int, ...]:
    given = config.extra.get("engine_version")
    version = parse_version(str(given)) if given else installed_version(command, "tensorrt_llm") or ASSUMED_VERSION
    if version is None:
        raise ConfigError(f"engine_version '{given}' is no version: write it as 1.3.0")
    if version < OLDEST_VERSION:
        raise ConfigError(
            f"TensorRT-LLM {version_text(version)} is too old: {version_text(OLDEST_VERSION)} is the oldest supported"
        )
    return version


def base_settings(base_args: tuple[str, ...]) -> dict[str, Any]:
    """Fields of `ServingConfig` that the user's production settings fix: defaults of each candidate, so that off is production."""
    flags = cli.base_flags(base_args, _ALIASES)
    fields: dict[str, Any] = {}
    for name, field in (("max-batch-size", "max_num_seqs"), ("tp-size", "tensor_parallel")):
        if name in flags:
            fields[field] = cli.integer(name, flags[name])
    document = _base_document(flags)
    fields["chunked_prefill"] = bool(document.get("enable_chunked_prefill", False))  # off unless asked for
    cache = document.get("kv_cache_config") or {}
    if "dtype" in cache:
        fields["kv_cache_dtype"] = str(cache["dtype"])
    if "enable_block_reuse" in cache:
        fields["prefix_caching"] = bool(cache["enable_block_reuse"])
    return fields


def _base_document(flags: Mapping[str, list[str]]) -> dict[str, Any]:
    """The user's YAML file, on top of those of his flags that our YAML file would override; his speculation is left out."""
    cache: dict[str, Any] = {}
    if "free-gpu-memory-fraction" in flags:
        cache["free_gpu_memory_fraction"] = float(flags["free-gpu-memory-fraction"][0])
    if "kv-cache-dtype" in flags:
        cache["dtype"] = flags["kv-cache-dtype"][0]
    document: dict[str, Any] = {"kv_cache_config": cache} if cache else {}
    if "enable-chunked-prefill" in flags:
        document["enable_chunked_prefill"] = True
    if "config" in flags:
        document = merged(document, _read_yaml(flags["config"][0]))
    return {key: value for key, value in document.items() if key != "speculative_config"}


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        document = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--base-args: cannot read the settings file '{path}': {str(error).splitlines()[0]}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"--base-args: the settings file '{path}' holds no mapping of settings")
    return document


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` on top of `below`, mappings inside merged likewise."""
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        out[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out


def read_back(endpoint: Endpoint, config: ServingConfig, log: str) -> Endpoint:
    """`endpoint` with version and KV-cache tokens. What else is in effect the server does not say, and a warning says so."""
    reply = call(f"{endpoint.base_url}/version", api_key_env=endpoint.api_key_env)
    body = reply.json() if reply is not None and reply.status == 200 else None
    tokens = _KV_TOKENS.findall(log)
    return replace(
        endpoint,
        version=body.get("version") if isinstance(body, dict) else None,
        kv_cache_tokens=int(tokens[-1]) if tokens else None,
        warnings=(*endpoint.warnings, "TensorRT-LLM's settings in effect were not read back: they are as asked, unverified"),
    )


def tokens_per_step(choice: Mapping[str, Any]) -> float | None:
    """Tokens per decode iteration of one request, the target's own included, from a choice of its response.

    0 comes from code paths that do not count it, so it means unknown.
    """
    value = choice.get("avg_decoded_tokens_per_iter")
    return float(value) if isinstance(value, int | float) and value > 0 else None
