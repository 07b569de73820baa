"""SGLang: from a `ServingConfig` to its command line, for the version that is installed, and back from what really runs.

What each version accepts was read from the releases 0.4.1 to 0.5.23. SGLang rewrites arguments that do not fit together instead
of refusing them; a configuration that it would rewrite is refused here. The engine itself is not imported: it lives in an
environment of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from backends import command_line as cli
from backends import sglang_server_info as server_info
from backends.http_client import call
from backends.installed import installed_version, version_text
from backends.k_schedule import ranges, schedule_fault
from backends.types import NEEDS_DRAFT, ConfigError, Endpoint, Launch, ServingConfig, WorkloadFacts

NAME = "sglang"
ONLINE_QUANTIZATIONS = frozenset({"fp8", "mxfp8", "bitsandbytes"})
"""Weight quantizations that SGLang applies while loading; the others need a checkpoint that is quantized so."""
QUANTIZATIONS = ONLINE_QUANTIZATIONS | {
    "none", "awq", "awq_marlin", "gptq", "gptq_marlin", "gguf", "compressed-tensors", "modelopt_fp8", "modelopt_fp4",
    "w8a8_int8", "w8a8_fp8", "mxfp4", "moe_wna16", "w4afp8",
}  # fmt: skip
DEFAULT_COMMAND = ("python3", "-m", "sglang.launch_server")
SERVED_MODEL = "model"
READY_TIMEOUT_S = 1800.0
ASSUMED_VERSION = (0, 5, 23)  # where the version cannot be found out (a container)
ADAPTIVE_FILE = "adaptive.json"

# Variant -> SGLang's algorithm and the first version looked at that has it. MTP layers are an EAGLE head inside the target
# (`NEXTN` is another spelling of EAGLE).
_ALGORITHMS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "ngram": ("NGRAM", (0, 5, 3)),
    "draft_model": ("STANDALONE", (0, 5, 2)),
    "eagle2": ("EAGLE", (0, 4, 4)),
    "eagle3": ("EAGLE3", (0, 4, 5)),
    "mtp": ("EAGLE", (0, 4, 8)),
    "dflash": ("DFLASH", (0, 5, 11)),
    "dspark": ("DSPARK", (0, 5, 16)),
}
VARIANTS = frozenset({"off", *_ALGORITHMS})
_TREES = frozenset({"draft_model", "eagle2", "eagle3", "mtp"})
_ADAPTIVE = frozenset({"eagle2", "eagle3", "mtp"})
CUDA_ONLY = frozenset({"dflash", "dspark"})
_DRAFT_QUANTIZATION_SINCE = (0, 5, 7)  # before: a draft is quantized like its target
_ADAPTIVE_SINCE = (0, 5, 11)
_NO_FLOAT_KV_NAMES_BEFORE = (0, 5, 4)

_KV_CACHE_DTYPES: Mapping[str, str] = {
    "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2", "bf16": "bf16", "bfloat16": "bfloat16",
    "mxfp8": "mxfp8", "nvfp4": "nvfp4",
}  # fmt: skip
NGRAM_TRIE_DEPTH = 18  # SGLang's default; a match and its continuation share it

ENGINE_SCHEDULE: Mapping[str, Mapping[str, Any]] = {
    "1": {"candidate_steps": [1, 3, 5, 7], "up_hysteresis": 0.0, "down_hysteresis": -0.25, "ceiling_coeff": 0},
    "8": {"candidate_steps": [0, 1, 3], "up_hysteresis": 0.0, "down_hysteresis": 0.0, "ceiling_coeff": 0},
    "32": {"candidate_steps": [0, 1], "up_hysteresis": 0.0, "down_hysteresis": 0.0, "ceiling_coeff": 0},
    "64": {"candidate_steps": [0], "up_hysteresis": 0.0, "down_hysteresis": 0.0, "ceiling_coeff": 0},
}
"""What SGLang 0.5.23 adapts K within, by batch size, where it is given no file: written out so that a deployment has it too."""

_SPECIAL_EXTRA = frozenset({"adaptive", "k_schedule", "env", "trust_remote_code"})
_OWN_FLAGS = {
    "host", "port", "model-path", "served-model-name", "enable-metrics", "tensor-parallel-size", "max-running-requests",
    "disable-radix-cache", "api-key",
}  # fmt: skip
_ALIASES = {"model": "model-path", "tp": "tensor-parallel-size", "tp-size": "tensor-parallel-size", "q": "quantization"}


def supports(config: ServingConfig, facts: WorkloadFacts) -> str | None:
    """Why SGLang cannot run `config` as it stands, in one line; None if it can. What the version decides is left to `launch`."""
    if config.variant not in VARIANTS:
        return f"SGLang has no variant '{config.variant}'"
    if config.variant in NEEDS_DRAFT and not config.draft:
        return f"variant '{config.variant}' needs a draft checkpoint: give --draft {config.variant}=ID_OR_PATH"
    if config.draft and config.draft.startswith("self-"):
        return f"draft '{config.draft}' exists in the reference engine only"
    for what, name in (("weight", config.weight_quantization), ("draft", config.draft_quantization)):
        if name not in QUANTIZATIONS:
            return f"SGLang has no {what} quantization '{name}', it has {', '.join(sorted(QUANTIZATIONS))}"
    if config.kv_cache_dtype != "auto" and config.kv_cache_dtype not in _KV_CACHE_DTYPES:
        return f"SGLang has no KV-cache type '{config.kv_cache_dtype}', it has auto, {', '.join(_KV_CACHE_DTYPES)}"
    if any(cli.flag(key) == "trust-remote-code" and value for key, value in config.extra.items()):
        return "remote code of a checkpoint is never run"
    if config.variant != "off" and "min_p" in facts.sampling_parameters:
        return "SGLang ignores min_p when it speculates, and the trace uses it"
    return _shape_fault(config) or _schedule_fault(config)


def _shape_fault(config: ServingConfig) -> str | None:
    """The rules of SGLang for steps, width and nodes; outside them it changes the numbers or fails while it runs."""
    if config.variant == "off":
        return None
    nodes, chain = config.num_draft_tokens, config.k + 1  # nodes count the last accepted token, which is the root
    if config.variant == "ngram" and config.k >= NGRAM_TRIE_DEPTH:
        return f"K = {config.k}: SGLang's n-gram trie is {NGRAM_TRIE_DEPTH} deep, so K must be below"
    if config.variant not in _TREES:
        if config.topk != 1 and config.variant != "ngram":
            return f"SGLang's {config.variant} drafts one chain: topk must be 1"
        if nodes not in (None, chain):
            return f"SGLang's {config.variant} verifies K + 1 = {chain} tokens, not {nodes}"
        return None
    if config.topk == 1:
        return None if nodes in (None, chain) else f"with topk 1 SGLang verifies K + 1 = {chain} tokens, not {nodes}"
    if nodes is None:
        return "a tree (topk above 1) needs the number of nodes to verify: give --tree-nodes"
    most = 1 + config.topk + (config.k - 1) * config.topk**2
    if not chain <= nodes <= most:
        return f"a tree of depth {config.k} and width {config.topk} has {chain} to {most} nodes to verify, not {nodes}"
    return None


def _schedule_fault(config: ServingConfig) -> str | None:
    if config.extra.get("adaptive") is None and config.extra.get("k_schedule") is None:
        return None
    if config.variant not in _ADAPTIVE or config.topk != 1:
        return "SGLang varies K by batch size for EAGLE and MTP chains only (topk 1)"
    fault = schedule_fault(config)
    if fault:
        return fault
    candidates = {k for entry in adaptive_schedule(config).values() for k in entry["candidate_steps"]}
    if config.k not in candidates:
        return f"K = {config.k} is not among the values that the schedule may take ({', '.join(map(str, sorted(candidates)))})"
    return None


def adaptive_schedule(config: ServingConfig) -> dict[str, dict[str, Any]]:
    """SGLang's schedule file: first batch size of a range -> the K it may take there (one value: K is fixed by batch size)."""
    if config.extra.get("k_schedule"):
        return {str(first): {"candidate_steps": [k]} for first, _, k in ranges(config)}
    adaptive = config.extra.get("adaptive")
    given = adaptive if isinstance(adaptive, Mapping) else ENGINE_SCHEDULE
    return {key: dict(entry) for key, entry in given.items()}


def launch(config: ServingConfig, *, port: int, command: tuple[str, ...], base_args: tuple[str, ...]) -> Launch:
    """The SGLang server of `config` on 127.0.0.1:`port`; every setting that a measurement depends on is on its command line.

    `config.extra`: `adaptive` (True for the engine's own schedule, or a schedule), `k_schedule` ([[first, last, K], ...] by
    batch size), `env`; every other key is a flag (`{"chunked_prefill_size": 4096, "mem_fraction_static": 0.8}`).

    Raises:
        ConfigError: the installed version lacks what `config` asks for, or `base_args` hold what must not be there.
    """
    version = installed_version(command, "sglang") or ASSUMED_VERSION
    flags = cli.base_flags(base_args, _ALIASES)
    extra = {cli.flag(key): value for key, value in config.extra.items() if key not in _SPECIAL_EXTRA}
    device = str(extra.get("device") or (flags.get("device") or ["cuda"])[0])
    own = _server_flags(config, version) | speculative_flags(config, version, device) | _device_flags(flags, device)
    own |= extra
    argv = [*command, *(["-m", "sglang.launch_server"] if cli.is_python(command) else []), "--model-path", config.model]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED_MODEL, "--enable-metrics"]
    for name, value in own.items():
        argv += cli.render(name, value) if value is not False else []
    for name, values in flags.items():
        if name not in _OWN_FLAGS and name not in own and not name.startswith("speculative-"):
            argv += [f"--{name}", *values]
    adaptive = "speculative-adaptive" in own
    return Launch(
        argv=tuple(argv),
        env=_environment(config, device),
        files={ADAPTIVE_FILE: json.dumps(adaptive_schedule(config), indent=2) + "\n"} if adaptive else {},
        served_model=SERVED_MODEL,
        ready_timeout_s=READY_TIMEOUT_S,
    )


def base_settings(base_args: tuple[str, ...]) -> dict[str, Any]:
    """Fields of `ServingConfig` that the user's production flags set: defaults of each candidate, so that off is production."""
    flags = cli.base_flags(base_args, _ALIASES)
    fields: dict[str, Any] = {}
    for name, field in (("max-running-requests", "max_num_seqs"), ("tensor-parallel-size", "tensor_parallel")):
        if name in flags:
            fields[field] = cli.integer(name, flags[name])
    for name, field in (("kv-cache-dtype", "kv_cache_dtype"), ("quantization", "weight_quantization")):
        if name in flags:
            fields[field] = flags[name][0]
    if "disable-radix-cache" in flags:
        fields["prefix_caching"] = False
    if flags.get("chunked-prefill-size") == ["-1"]:
        fields["chunked_prefill"] = False
    return fields


def _server_flags(config: ServingConfig, version: tuple[int, ...]) -> dict[str, Any]:
    """Flags that off and on share. The cap on running requests is one: SGLang lowers it to 48 when it speculates."""
    flags: dict[str, Any] = {
        "tensor-parallel-size": config.tensor_parallel,
        "max-running-requests": config.max_num_seqs,
    }
    if not config.chunked_prefill:
        flags["chunked-prefill-size"] = -1
    if not config.prefix_caching:
        flags["disable-radix-cache"] = True
    if config.kv_cache_dtype != "auto":
        dtype = _KV_CACHE_DTYPES[config.kv_cache_dtype]
        if not dtype.startswith("fp8") and version < _NO_FLOAT_KV_NAMES_BEFORE:
            raise ConfigError(f"KV-cache type '{dtype}' needs a newer SGLang than {version_text(version)}")
        flags["kv-cache-dtype"] = dtype
    if config.weight_quantization != "none":
        flags["quantization"] = config.weight_quantization
    return flags


def speculative_flags(config: ServingConfig, version: tuple[int, ...], device: str = "cuda") -> dict[str, Any]:
    """The flags that turn speculation on for `config` in SGLang `version`; none for off.

    Steps, width and verified tokens are always given together: with one of them missing SGLang fails or guesses the others.

    Raises:
        ConfigError: that version or device has no such variant, or cannot do what is asked of it.
    """
    if config.variant == "off":
        return {}
    algorithm, since = _ALGORITHMS[config.variant]
    if version < since:
        raise ConfigError(f"variant '{config.variant}' needs SGLang {version_text(since)}, this is {version_text(version)}")
    if device == "cpu" and config.variant in CUDA_ONLY:
        raise ConfigError(f"variant '{config.variant}' needs a GPU in SGLang, this server runs on the CPU")
    block = config.variant in CUDA_ONLY  # one draft pass for the whole block, which SGLang counts as one step
    flags: dict[str, Any] = {
        "speculative-algorithm": algorithm,
        "speculative-num-steps": 1 if block else config.k,
        "speculative-eagle-topk": config.topk,
        "speculative-num-draft-tokens": config.num_draft_tokens or config.k + 1,
    }
    if config.variant == "ngram":
        return {**flags, "speculative-ngram-max-bfs-breadth": config.topk}
    flags["speculative-draft-model-path"] = config.model if config.variant == "mtp" else config.draft
    if config.variant == "dspark":
        flags["speculative-dspark-block-size"] = config.k
    flags |= _draft_quantization(config, version)
    if config.extra.get("adaptive") or config.extra.get("k_schedule"):
        if version < _ADAPTIVE_SINCE:
            raise ConfigError(f"K by batch size needs SGLang {version_text(_ADAPTIVE_SINCE)}, this is {version_text(version)}")
        flags |= {"speculative-adaptive": True, "speculative-adaptive-config": "{folder}/" + ADAPTIVE_FILE}
    return flags


def _draft_quantization(config: ServingConfig, version: tuple[int, ...]) -> dict[str, Any]:
    """Said explicitly, since an unset one inherits the target's; `unquant` leaves a draft as its checkpoint has it."""
    if version >= _DRAFT_QUANTIZATION_SINCE:
        name = "unquant" if config.draft_quantization == "none" else config.draft_quantization
        return {"speculative-draft-model-quantization": name}
    if config.draft_quantization != config.weight_quantization:
        raise ConfigError(
            f"SGLang {version_text(version)} quantizes a draft like its target ({config.weight_quantization}): "
            f"a draft with '{config.draft_quantization}' needs {version_text(_DRAFT_QUANTIZATION_SINCE)}"
        )
    return {}


def _device_flags(flags: Mapping[str, list[str]], device: str) -> dict[str, Any]:
    """On a CPU: attention that can verify drafts, and the same scheduler for off and on, which SGLang would else change.

    Both attention flags, because the single `--attention-backend intel_amx` is rewritten to `torch_native`, which verifies
    nothing. Speculation has no overlapped schedule there, so off goes without it too.
    """
    if device != "cpu":
        return {}
    given = {name for name in flags if name.endswith("attention-backend")}
    attention = {} if given else {"prefill-attention-backend": "intel_amx", "decode-attention-backend": "intel_amx"}
    return {**attention, "disable-overlap-schedule": True}


def _environment(config: ServingConfig, device: str) -> dict[str, str]:
    env = {"SGLANG_USE_CPU_ENGINE": "1"} if device == "cpu" else {}
    return {**env, **{key: str(value) for key, value in config.extra.get("env", {}).items()}}


def read_back(endpoint: Endpoint, config: ServingConfig, log: str) -> Endpoint:
    """`endpoint` with version, KV-cache tokens and effective settings, and a warning for each that differs from `config`."""
    body: Any = None
    for path in ("/server_info", "/get_server_info"):  # the first since 0.5.6
        reply = call(endpoint.base_url + path, api_key_env=endpoint.api_key_env)
        body = reply.json() if reply is not None and reply.status == 200 else None
        if isinstance(body, dict):
            break
    if not isinstance(body, dict):
        return replace(endpoint, warnings=(*endpoint.warnings, "SGLang's /server_info cannot be read: settings unverified"))
    resolved = server_info.settings(body)
    environment = {**os.environ, **{key: str(value) for key, value in config.extra.get("env", {}).items()}}
    warnings = [*server_info.differences(resolved, config, _expected(config)), *server_info.forced_acceptance(environment)]
    return replace(
        endpoint,
        version=resolved.get("version"),
        kv_cache_tokens=resolved.get("kv_cache_tokens"),
        resolved=resolved,
        warnings=(*endpoint.warnings, *warnings),
    )


def _expected(config: ServingConfig) -> dict[str, Any]:
    """What /server_info must say of speculation, by its own names; empty for off."""
    flags = speculative_flags(config, ASSUMED_VERSION)
    names = ("speculative-algorithm", "speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens")
    return {name.replace("-", "_"): flags[name] for name in names if name in flags}
