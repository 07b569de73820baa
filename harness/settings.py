"""What the user asked for, resolved once: the input of the main job and the content of `config.yaml`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from backends.registry import ADAPTERS
from backends.types import NEEDS_DRAFT, VARIANTS, ConfigError

STRATEGIES = ("funnel", "grid", "random")
OBJECTIVES = ("e2e_p50", "e2e_p95", "tpot_p50", "throughput", "goodput", "cost")
PROBES = ("interference",)
EXECUTORS = ("local", "ray")
SLO_METRICS = ("ttft_p50", "ttft_p95", "ttft_p99", "tpot_p50", "tpot_p95", "tpot_p99", "e2e_p50", "e2e_p95", "e2e_p99")


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Everything that shapes a run. Two runs with equal settings on equal machines ask the same question."""

    traces: tuple[str, ...]
    out: str
    backends: tuple[str, ...] = ("reference",)
    engines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # backend -> command that starts it
    endpoints: Mapping[str, str] = field(default_factory=dict)  # variant -> URL of a server that already runs
    api_key_env: str | None = None
    base_args: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # backend -> its production flags
    model: str = "demo"
    drafts: Mapping[str, str] = field(default_factory=dict)  # variant -> checkpoint
    variants: tuple[str, ...] = ("off", "ngram")
    k: tuple[int, ...] = (2, 4, 6)
    topk: tuple[int, ...] = (1,)
    tree_nodes: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = (1, 4, 16)
    quantization: tuple[str, ...] = ("none",)
    kv_cache_dtype: tuple[str, ...] = ("auto",)
    draft_quantization: tuple[str, ...] = ("none",)
    tensor_parallel: int = 1
    max_num_seqs: int = 64
    max_quality_loss: float = 0.0
    strategy: str = "funnel"
    objectives: tuple[str, ...] = ()  # empty: DESIGN.md's default rule
    slo: Mapping[str, float] = field(default_factory=dict)  # metric -> seconds
    budget_s: float | None = None
    max_trials: int | None = None
    seed: int = 0
    search_requests: int = 24
    confirm_requests: int = 80
    replays: int = 1  # of the trace's own load, for each finalist and its off
    max_output_tokens: int | None = None
    format: str | None = None
    window: tuple[float, float] | None = None
    limit: int | None = None
    thin: float | None = None
    time_scale: float = 1.0
    jitter_s: float | None = None
    time_unit: str | None = None
    prompts: str | None = None
    probes: tuple[str, ...] = ()  # looks beyond the measured loads: interference
    gpu_hourly_usd: float | None = None
    storage: str | None = None
    executor: str | None = None  # one load at a time in this process, unless named
    ray_address: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        self._check_names()
        self._check_numbers()
        for variant in self.variants:
            if variant in NEEDS_DRAFT and variant not in self.drafts and not self.endpoints and self.model != "demo":
                hint = " ('self-int4' drafts with the target's own int4 copy)" if variant == "draft_model" else ""
                raise ConfigError(f"variant '{variant}' needs a draft: add --draft {variant}=ID_OR_PATH{hint}")
        for variant in self.drafts:
            if variant not in self.takes_draft:
                raise ConfigError(f"--draft {variant}=...: '{variant}' is no variant that takes a draft checkpoint")

        self._check_endpoints()
        if self.ray_address and self.executor != "ray":
            raise ConfigError("--ray-address: add --executor ray")

    @property
    def takes_draft(self) -> frozenset[str]:
        """Variants with a draft checkpoint. Servers find MTP modules in the target's own; the reference engine takes them apart, too."""
        return NEEDS_DRAFT | {"mtp"} if set(self.backends) == {"reference"} else NEEDS_DRAFT

    def _check_endpoints(self) -> None:
        if not self.endpoints:
            return
        if self.executor:
            raise ConfigError("--executor: servers named by --endpoint run already; leave it out")
        if "off" not in self.endpoints:
            raise ConfigError("--endpoint: a server without speculation is needed to compare with: add --endpoint off=URL")
        for variant in self.endpoints:
            if variant not in VARIANTS:
                raise ConfigError(f"--endpoint {variant}=...: unknown variant; choose from {', '.join(VARIANTS)}")
        if len(self.endpoints) > 1 and len(self.k) != 1:
            raise ConfigError("--endpoint: say with which K the speculating server runs: --k N")

    def _check_names(self) -> None:
        checks: tuple[tuple[str, Sequence[str], Sequence[str]], ...] = (
            ("--variants", self.variants, VARIANTS),
            ("--backend", self.backends, tuple(ADAPTERS)),
            ("--strategy", (self.strategy,), STRATEGIES),
            ("--probe", self.probes, PROBES),
            ("--objective", self.objectives, OBJECTIVES),
            ("--executor", (self.executor,) if self.executor else (), EXECUTORS),
            ("--slo", tuple(self.slo), SLO_METRICS),
            ("--engine", tuple(self.engines), tuple(ADAPTERS)),
        )
        for option, given, allowed in checks:
            for name in given:
                if name not in allowed:
                    raise ConfigError(f"{option}: unknown '{name}'; choose from {', '.join(allowed)}")
        for backend in self.backends:
            known = ADAPTERS[backend].QUANTIZATIONS
            for name in self.quantization:
                if name not in known:
                    raise ConfigError(f"--quantization: {backend} has no '{name}'; it has {', '.join(sorted(known))}")

    def _check_numbers(self) -> None:
        for option, values in (("--k", self.k), ("--batch-sizes", self.batch_sizes), ("--topk", self.topk)):
            if not values or min(values) < 1:
                raise ConfigError(f"{option}: needs whole numbers of 1 or more, got {','.join(map(str, values)) or 'none'}")
        if max(self.batch_sizes) > self.max_num_seqs:
            raise ConfigError(
                f"--batch-sizes: {max(self.batch_sizes)} is above --max-num-seqs {self.max_num_seqs}: "
                "the engine would queue what the client counts as concurrent; raise --max-num-seqs"
            )
        if self.time_scale <= 0:
            raise ConfigError(f"--time-scale: must be above 0, got {self.time_scale}")
        if self.search_requests < 2 or self.confirm_requests < 2:
            raise ConfigError("--search-requests and --confirm-requests: need 2 or more")
        if self.replays < 1:
            raise ConfigError("--replays: needs 1 or more")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for YAML: tuples become lists."""
        return {key: _plain(value) for key, value in asdict(self).items()}

    def with_out(self, out: Path) -> RunSettings:
        return replace(self, out=str(out))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return value


SPACE_NUMBERS = ("k", "topk", "tree_nodes", "batch_sizes")
SPACE_NAMES = ("variants", "quantization", "kv_cache_dtype", "draft_quantization")


def read_space(path: Path) -> dict[str, Any]:
    """The grid from a YAML file, as fields of `RunSettings`: ``variants: [off, ngram]``, ``k: 1..7``, ``batch_sizes: [1, 4]``.

    Raises:
        ConfigError: no such file, no mapping, a key that is no axis, or a value of another kind.
    """
    try:
        found = yaml.load(path.read_text(), Loader=yaml.BaseLoader)  # all is text: to YAML `off` would be false
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--space {path}: {str(error).splitlines()[0]}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--space {path}: needs lines such as 'k: 1..7', got {type(found).__name__}")
    fields: dict[str, Any] = {}
    for key, value in found.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if key in SPACE_NUMBERS:
            fields[key] = parse_numbers(f"--space {path}: {key}", text)
        elif key in SPACE_NAMES:
            fields[key] = parse_names(text)
        else:
            raise ConfigError(f"--space {path}: '{key}' is no axis; choose from {', '.join((*SPACE_NAMES, *SPACE_NUMBERS))}")
    return fields


def parse_numbers(option: str, text: str) -> tuple[int, ...]:
    """``1..7``, ``1,4,16`` or a mix of both -> sorted, without repeats."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*\.\.\s*(\d+))?\s*", part)
        if not match:
            raise ConfigError(f"{option}: '{part.strip()}' is no number or range; write 1,4,16 or 1..7")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ConfigError(f"{option}: the range {part.strip()} runs backwards")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def parse_names(text: str) -> tuple[str, ...]:
    """``off, ngram`` -> ("off", "ngram"), order kept, repeats dropped."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


_UNIT_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(option: str, text: str) -> float:
    """``500ms``, ``30m``, ``1.5h``, ``90`` (seconds) -> seconds."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h)?\s*", text)
    if not match or float(match[1]) <= 0:
        raise ConfigError(f"{option}: '{text}' is no duration; write 500ms, 90s, 30m or 2h")
    return float(match[1]) * _UNIT_S[match[2] or "s"]


def parse_slo(text: str) -> dict[str, float]:
    """``ttft_p95=500ms,tpot_p95=40ms`` -> {"ttft_p95": 0.5, "tpot_p95": 0.04}."""
    pairs = parse_pairs("--slo", text.split(","))
    return {name: parse_duration(f"--slo {name}", value) for name, value in pairs.items()}


def parse_pairs(option: str, items: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE items -> mapping; a name given twice is an error."""
    pairs: dict[str, str] = {}
    for item in items:
        name, sign, value = item.strip().partition("=")
        if not sign or not name or not value:
            raise ConfigError(f"{option}: '{item}' is not NAME=VALUE")
        if name in pairs:
            raise ConfigError(f"{option}: '{name}' is given twice")
        pairs[name] = value
    return pairs


def parse_command(option: str, text: str) -> tuple[str, ...]:
    """A quoted command line -> argv."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{option}: cannot read '{text}': {error}") from None


def parse_base_args(items: Sequence[str], backends: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Quoted production flags by backend: ``"--max-model-len 4096"`` for the only one, ``vllm="..."`` where there are several.

    Raises:
        ConfigError: flags of no backend in particular where several are measured, or of one that is not.
    """
    found: dict[str, tuple[str, ...]] = {}
    for item in filter(None, items):
        name, sign, text = item.partition("=")
        if not sign or name not in ADAPTERS:
            if len(backends) > 1:
                raise ConfigError(
                    f"--base-args: say whose flags they are, since several backends are measured: {backends[0]}='{item}'"
                )
            name, text = backends[0], item
        if name not in backends:
            raise ConfigError(f"--base-args {name}=...: {name} is not measured; add --backend {name}")
        found[name] = found.get(name, ()) + parse_command("--base-args", text)
    return found


def parse_window(text: str) -> tuple[float, float]:
    """``120-300`` (seconds of the trace) -> (120.0, 300.0)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*-\s*(\d+(?:\.\d+)?)\s*", text)
    if not match or float(match[2]) <= float(match[1]):
        raise ConfigError(f"--window: '{text}' is no window; write START-END in seconds, such as 0-300")
    return float(match[1]), float(match[2])
