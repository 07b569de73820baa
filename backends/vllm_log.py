"""What a vLLM server says of itself, in its log and on its metrics page: the settings in effect and how long loading took."""

from __future__ import annotations

import ast
import re
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from backends.types import ServingConfig

_NUMBER = r"([\d,]+(?:\.\d+)?)"
# name -> (pattern, conversion); the last match in the log counts, since the engine process prints after the front end.
_LOG_PATTERNS: dict[str, tuple[str, type]] = {
    "max_num_seqs": (r"'max_num_seqs': (\d+)", int),
    "max_num_batched_tokens": (r"max_num_batched_tokens=(\d+)", int),
    "max_num_scheduled_tokens": (r"max_num_scheduled_tokens is set to (\d+)", int),
    "max_model_len": (r"\bmax_seq_len=(\d+)", int),
    "tensor_parallel": (r"\btensor_parallel_size=(\d+)", int),
    "device": (r"\bdevice_config=(\w+)", str),
    "dtype": (r"\bdtype=(?:torch\.)?(\w+)", str),
    "quantization": (r"\bquantization=([\w-]+)", str),
    "kv_cache_dtype": (r"\bkv_cache_dtype=(\w+)", str),
    "prefix_caching": (r"\benable_prefix_caching=(True|False)", bool),
    "chunked_prefill": (r"\benable_chunked_prefill=(True|False)", bool),
    "enforce_eager": (r"\benforce_eager=(True|False)", bool),
    "kv_cache_tokens": (rf"KV cache size: {_NUMBER} tokens", int),
    "max_concurrency": (rf"Maximum concurrency for [\d,]+ tokens per request: {_NUMBER}x", float),
    "load_s": (rf"(?:Model loading took .* and|Loading weights took) {_NUMBER} seconds", float),
    "compile_s": (rf"torch\.compile (?:took|takes) {_NUMBER} s in total", float),
    "graph_capture_s": (rf"Graph capturing finished in {_NUMBER} secs", float),
    "init_engine_s": (rf"init engine .* took {_NUMBER} s", float),
}
_SPECULATIVE = re.compile(
    r"speculative_config=(?:(None)|SpeculativeConfig\(method='(\w+)', model=(?:None|'([^']*)'), num_spec_tokens=(\d+))"
)
_GRAPH_SIZES = re.compile(r"'?cudagraph_capture_sizes'?[:=] ?(\[[\d, ]*\])")
_FALLBACK = re.compile(r"Disabling num_speculative_tokens_per_batch_size[^\n]*")


def settings_from_log(log: str) -> dict[str, Any]:
    """Effective settings, seconds of the start's phases, and notes that vLLM logs when it changes what was asked."""
    out: dict[str, Any] = {}
    for name, (pattern, kind) in _LOG_PATTERNS.items():
        found = re.findall(pattern, log)
        if found:
            out[name] = _convert(found[-1], kind)
    speculative = _SPECULATIVE.findall(log)
    if speculative:
        none, method, model, k = speculative[-1]
        out["speculative"] = None if none else {"method": method, "model": model or None, "k": int(k)}
    sizes = _GRAPH_SIZES.findall(log)
    if sizes:
        out["cuda_graph_sizes"] = ast.literal_eval(sizes[-1])
    fallback = _FALLBACK.search(log)
    if fallback:
        out["k_schedule_disabled"] = fallback.group(0)
    return out


def settings_from_metrics(page: str) -> dict[str, Any]:
    """KV-cache settings from the `vllm:cache_config_info` series."""
    line = next((line for line in page.split("\n") if line.startswith("vllm:cache_config_info{")), None)
    if line is None:
        return {}
    labels = next(iter(text_string_to_metric_families(line))).samples[0].labels
    out: dict[str, Any] = {}
    if labels.get("kv_cache_size_tokens", "").isdigit():
        out["kv_cache_tokens"] = int(labels["kv_cache_size_tokens"])
    elif labels.get("num_gpu_blocks", "").isdigit() and labels.get("block_size", "").isdigit():
        out["kv_cache_tokens"] = int(labels["num_gpu_blocks"]) * int(labels["block_size"])
    if "cache_dtype" in labels:
        out["kv_cache_dtype"] = labels["cache_dtype"]
    if labels.get("enable_prefix_caching") in ("True", "False"):
        out["prefix_caching"] = labels["enable_prefix_caching"] == "True"
    return out


def differences(resolved: dict[str, Any], config: ServingConfig) -> tuple[str, ...]:
    """One line for each setting in effect that is not what `config` asked for. What the server did not say is not judged."""
    asked: dict[str, Any] = {
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel": config.tensor_parallel,
        "prefix_caching": config.prefix_caching,
        "chunked_prefill": config.chunked_prefill,
    }
    if config.kv_cache_dtype != "auto":
        asked["kv_cache_dtype"] = config.kv_cache_dtype
    if config.weight_quantization != "none":
        asked["quantization"] = config.weight_quantization
    out = [
        f"asked for {name} {value}, vLLM runs with {resolved[name]}"
        for name, value in asked.items()
        if name in resolved and resolved[name] != value
    ]
    if "speculative" in resolved:
        out += _speculative_differences(resolved["speculative"], config)
    if "k_schedule_disabled" in resolved:
        out.append(f"vLLM dropped the K schedule: {resolved['k_schedule_disabled']}")
    return tuple(out)


def _speculative_differences(running: dict[str, Any] | None, config: ServingConfig) -> list[str]:
    if running is None:
        return [] if config.variant == "off" else [f"asked for {config.label()}, vLLM runs without speculation"]
    if config.variant == "off":
        return [f"asked for off, vLLM speculates with {running['method']}"]
    if running["k"] != config.k:
        return [f"asked for K {config.k}, vLLM runs with {running['k']}"]
    return []


def _convert(text: str, kind: type) -> Any:
    if kind is bool:
        return text == "True"
    if kind is str:
        return text
    return kind(text.replace(",", ""))
