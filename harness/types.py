"""What flows through the harness: a load, one record per request, a measurement, a decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from backends.types import ServingConfig, SpecCounters

Status = Literal["completed", "failed", "cancelled", "refused"]
State = Literal["COMPLETE", "PRUNED", "FAIL", "INFEASIBLE"]
Role = Literal["baseline", "search", "confirm"]

CAPACITY_STAGE = "capacity"
"""Stage of the trials that replay the trace at other rates than its own: they say what a server carries, and no speed-up."""


@dataclass(frozen=True, slots=True)
class Load:
    """How requests are sent: at the trace's own times (`trace`, open loop) or `concurrency` at a time (`closed`)."""

    mode: Literal["trace", "closed"]
    trace: str  # name of the trace
    concurrency: int | None = None
    time_scale: float | None = None  # intended time = arrival × time_scale: 0.5 sends twice as fast

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What happened to one request. Times are seconds from the start of the load, None where undefined.

    `chunk_s[i]` is the socket read at which chunk i (one that carried tokens) arrived and `chunk_tokens[i]` how many tokens it
    held. With speculation a chunk may hold several tokens, so the gap of two chunks is a chunk gap and not a token's latency.
    """

    index: int
    status: Status
    failure: str | None = None
    intended_s: float = 0.0
    sent_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    tokens_source: str | None = None  # usage, token_ids, tokenizer
    finish_reason: str | None = None
    chunk_s: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    category: str | None = None
    session: str | None = None
    text: str | None = None  # kept in memory for audits, never written to the run directory
    token_ids: tuple[int, ...] | None = None  # likewise

    @property
    def ttft_s(self) -> float | None:
        """Intended send time to first output token."""
        return None if self.first_token_s is None else self.first_token_s - self.intended_s

    @property
    def e2e_s(self) -> float | None:
        """Intended send time to last output token."""
        return None if self.last_token_s is None else self.last_token_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """(last token − first token) ÷ (output tokens − 1); undefined for fewer than two tokens.

        The first chunk may hold several tokens, which all arrived at `first_token_s`; they count as they do for the user.
        """
        if self.first_token_s is None or self.last_token_s is None or not self.output_tokens or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Summary of one latency: exact percentiles of the raw records, and intervals where the sample allows them."""

    p50: float
    p95: float
    p99: float
    mean: float
    p50_ci95: tuple[float, float] | None
    p95_ci95: tuple[float, float] | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Speculation:
    """Acceptance of one trial; the field names are those of `result.json`."""

    tau: float | None  # tokens really emitted after each sequence's first ÷ decode steps
    tau_ci95: tuple[float, float] | None = None
    tau_drafted: float | None = None  # 1 + accepted ÷ drafted steps
    tau_counter: float | None = None  # tau as the server's own counters give it
    acceptance_rate: float | None = None  # accepted ÷ proposed draft tokens
    position_rates: tuple[float, ...] = ()  # marginal: share of decode steps in which draft position i was accepted
    verify_steps: int | None = None
    drafted_steps: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One load on one server, measured. A trial that failed has none, so a failure can never win."""

    requests: Mapping[str, Any]  # sent, completed, failed, failures: {kind: count}
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    chunk_gap_s: Distribution | None
    e2e_s: Distribution | None
    output_tokens_per_s: float | None
    requests_per_s: float | None
    goodput_rps: float | None
    batch_size: Mapping[str, float | None]  # mean, p95 of running sequences
    prefix_hit_rate: float | None
    preemptions: int | None
    send_lag_s: Mapping[str, float | None]
    speculation: Speculation
    throughput_ci95: tuple[float, float] | None = None
    window_s: tuple[float, float] = (0.0, 0.0)  # the measured part of the load: ramp-up and drain excluded
    excluded: Mapping[str, int] = field(default_factory=dict)  # requests outside the window, by reason
    gpus: Sequence[Mapping[str, Any]] | None = None  # clocks, temperature, slowdowns; None without a local GPU
    invalid: str | None = None  # why this measurement must not be used
    warnings: tuple[str, ...] = ()

    def metrics(self) -> dict[str, Any]:
        """The `metrics` object of `result.json`."""
        out = asdict(self)
        for name in ("speculation", "invalid", "warnings"):
            out.pop(name)
        return out


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer for one trace; `to_dict` is one entry of `decisions` in `result.json`."""

    trace: str
    verdict: Literal["enable", "skip", "enable_below_batch", "no_clear_winner", "not_measurable"]
    config: ServingConfig | None
    speedup: Mapping[str, Any] | None
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    below_batch: int | None = None
    break_even_batch: Mapping[str, Any] = field(default_factory=lambda: {"value": None, "ci95": None})
    k_by_batch_size: tuple[tuple[int, int, int], ...] = ()
    launch: Mapping[str, Any] | None = None
    by_engine: tuple[Mapping[str, Any], ...] = ()
    depth: Mapping[str, Any] | None = None  # overhead, rules of thumb, sensitivity: `harness.depth`

    def to_dict(self) -> dict[str, Any]:
        out = asdict(self)
        out["config"] = self.config.to_dict() if self.config else None
        return out


__all__ = [
    "Decision",
    "Distribution",
    "Load",
    "Measurement",
    "RequestRecord",
    "Role",
    "ServingConfig",
    "SpecCounters",
    "Speculation",
    "State",
    "Status",
]
