"""Plain data that crosses the border between harness and engine: what to run, how to start it, what it says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

VARIANTS = (
    "off",
    "ngram",
    "suffix",
    "draft_model",
    "medusa",
    "eagle2",
    "eagle3",
    "p_eagle",
    "mtp",
    "dflash",
    "dspark",
)
"""Every speculative variant the product knows. A backend says which of them it has."""

NEEDS_DRAFT = frozenset({"draft_model", "medusa", "eagle2", "eagle3", "p_eagle", "dflash", "dspark"})
"""Variants that need a `draft` checkpoint (`mtp` heads come with the target, `ngram` and `suffix` need none)."""


class BackendError(Exception):
    """An engine could not be started, or died. One line: what, why, what to do. `log_tail` holds the end of its log."""

    def __init__(self, message: str, *, kind: str = "crash", log_tail: str = "") -> None:
        super().__init__(message)
        self.kind = kind  # missing_command, out_of_memory, bad_flag, missing_weights, unsupported, port_in_use, hang, crash
        self.log_tail = log_tail


class ConfigError(Exception):
    """A setting or checkpoint that cannot work (exit code 2). One line: what, where, what to do."""


@dataclass(frozen=True, slots=True)
class ServingConfig:
    """One way to run an engine. Two trials with equal `ServingConfig` ran the same server.

    `k` is the number of draft tokens proposed for each verification step along one chain; a tree adds `topk` (width) and
    `num_draft_tokens` (nodes verified per step). Off has `k` 0.
    """

    backend: str
    model: str
    variant: str = "off"
    k: int = 0
    topk: int = 1
    num_draft_tokens: int | None = None
    draft: str | None = None
    draft_quantization: str = "none"
    weight_quantization: str = "none"
    kv_cache_dtype: str = "auto"
    tensor_parallel: int = 1
    max_num_seqs: int = 64
    chunked_prefill: bool = True
    prefix_caching: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ConfigError(f"unknown variant '{self.variant}': choose from {', '.join(VARIANTS)}")
        if (self.variant == "off") != (self.k == 0):
            raise ConfigError(f"variant '{self.variant}' with K = {self.k}: off has K = 0, every other variant K >= 1")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "extra": dict(self.extra)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ServingConfig:
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in known})

    def off(self) -> ServingConfig:
        """The same server without speculation: what a speed-up of this configuration is measured against."""
        plain = {**self.to_dict(), "variant": "off", "k": 0, "topk": 1, "num_draft_tokens": None, "draft": None}
        return ServingConfig.from_dict({**plain, "draft_quantization": "none"})

    def label(self) -> str:
        """Short name for people: ``ngram K=4``, ``draft_model K=4 (int8 weights)``."""
        text = self.variant if self.variant == "off" else f"{self.variant} K={self.k}"
        if self.topk > 1:
            text += f" topk={self.topk} nodes={self.num_draft_tokens}"
        if self.weight_quantization != "none":
            text += f" ({self.weight_quantization} weights)"
        if self.kv_cache_dtype != "auto":
            text += f" ({self.kv_cache_dtype} KV cache)"
        return text


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start an engine, as data: it can be printed, compared, or pasted into a deployment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # added to the environment of the harness
    files: Mapping[str, str] = field(default_factory=dict)  # path relative to the trial's folder -> content
    served_model: str = "model"
    ready_timeout_s: float = 600.0

    def to_dict(self) -> dict[str, Any]:
        return {"argv": list(self.argv), "env": dict(self.env), "files": dict(self.files), "served_model": self.served_model}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A running OpenAI-compatible server and what it said about itself."""

    base_url: str  # http://127.0.0.1:PORT, without /v1
    model: str  # the name requests carry
    backend: str  # whose dialect its /metrics page speaks
    version: str | None = None
    startup_s: float | None = None
    kv_cache_tokens: int | None = None
    resolved: Mapping[str, Any] = field(default_factory=dict)  # effective settings, read back from the server
    warnings: tuple[str, ...] = ()
    api_key_env: str | None = None  # name of the environment variable that holds the key; never the key


@dataclass(frozen=True, slots=True)
class SpecCounters:
    """Cumulative counts of one server, or their increase over a window (`b - a`), summed over engines and ranks.

    A count that the server does not publish is None, never 0. `decode_steps` counts every (sequence, step) in which a sequence
    past its first token was stepped, drafted or not; `drafted_steps` only those with a draft.
    """

    generated_tokens: int | None = None
    first_tokens: int | None = None  # sequences that emitted their first token
    decode_steps: int | None = None
    drafted_steps: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    accepted_per_position: tuple[int, ...] | None = None  # [i]: steps in which draft position i was accepted
    prompt_tokens: int | None = None
    prefix_hit_tokens: int | None = None
    prefix_query_tokens: int | None = None
    preemptions: int | None = None
    engine_steps: int | None = None  # steps in which a sequence decoded; mean batch = decode_steps ÷ this
    process_start_s: float | None = None  # Unix time; a change means that the server restarted

    def __sub__(self, before: SpecCounters) -> SpecCounters:
        """Increase from `before` to this.

        Raises:
            ValueError: a counter fell, or the process started anew: the window cannot be measured.
        """
        if before.process_start_s is not None and self.process_start_s not in (None, before.process_start_s):
            raise ValueError("the server restarted during the measurement")

        def diff(name: str, after: Any, earlier: Any) -> Any:
            if after is None:
                return None
            if isinstance(after, tuple):
                earlier = earlier or ()
                padded = tuple(earlier) + (0,) * (len(after) - len(earlier))
                return tuple(diff(name, x, y) for x, y in zip(after, padded, strict=True))
            value = after - (earlier or 0)
            if value < 0:
                raise ValueError(f"counter {name} fell from {earlier} to {after}: the server was reset")
            return value

        return SpecCounters(
            **{
                f.name: diff(f.name, getattr(self, f.name), getattr(before, f.name))
                for f in fields(self)
                if f.name != "process_start_s"
            }
        )

    @property
    def tau_drafted(self) -> float | None:
        """1 + accepted ÷ drafted steps: what vLLM's counters give. None where nothing was drafted."""
        if self.accepted_tokens is None or not self.drafted_steps:
            return None
        return 1.0 + self.accepted_tokens / self.drafted_steps

    @property
    def tau(self) -> float | None:
        """Tokens after each sequence's first ÷ decode steps, as the server counts them. None where unknown."""
        if self.generated_tokens is None or self.first_tokens is None or not self.decode_steps:
            return None
        return (self.generated_tokens - self.first_tokens) / self.decode_steps


@dataclass(frozen=True, slots=True)
class WorkloadFacts:
    """What an adapter or a preflight may know of a workload."""

    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    sampling_parameters: frozenset[str] = frozenset()  # names used by any request: temperature, min_p, logit_bias, ...
    structured_output: bool = False
    tools: bool = False


@dataclass(frozen=True, slots=True)
class Gauges:
    """Momentary readings of a server's statistics page; None where it has none."""

    running: float | None = None  # sequences in the running batch
    waiting: float | None = None
    kv_use: float | None = None  # share of the KV cache in use, 0..1


class Adapter(Protocol):
    """What the harness needs to know of an engine. Each adapter is a module with these names (`backends.registry.ADAPTERS`)."""

    @property
    def NAME(self) -> str: ...

    @property
    def VARIANTS(self) -> frozenset[str]: ...

    @property
    def QUANTIZATIONS(self) -> frozenset[str]:
        """Weight quantizations it can apply or load."""
        ...

    @property
    def DEFAULT_COMMAND(self) -> tuple[str, ...]:
        """Used where the user gives no `--engine NAME=...`."""
        ...

    def supports(self, config: ServingConfig, facts: WorkloadFacts) -> str | None:
        """Why this configuration cannot run here, in one line; None if it can. Starts nothing."""
        ...

    def launch(self, config: ServingConfig, *, port: int, command: tuple[str, ...], base_args: tuple[str, ...]) -> Launch:
        """The process that serves `config` on 127.0.0.1:`port`.

        `command` is where the engine lives (a Python interpreter or a whole command), `base_args` the user's own flags.
        """
        ...

    def read_back(self, endpoint: Endpoint, config: ServingConfig, log: str) -> Endpoint:
        """`endpoint` completed with version, effective settings, KV capacity, and warnings where they differ from `config`."""
        ...
