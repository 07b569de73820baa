"""The world a simulated engine lives in: what a step costs, what is accepted, what the scheduler may do. Plain data.

The cost of one engine step is linear, because measured serving engines are nearly so: memory traffic and arithmetic of real
decode steps overlap little.

    seconds = fixed + weights(T) + token · T + prefill_token · P + context_token · C + draft(B, K)

with B sequences decoded, T = B · (1 + K) tokens verified, P prompt tokens prefilled in the step and C tokens of context read. A
mixture-of-experts model reads the experts that T tokens touch: 1 − (1 − share)^T of them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pydantic

from backends.types import VARIANTS, ConfigError

DEFAULT_CATEGORY = "default"


@dataclass(frozen=True, slots=True)
class TargetCost:
    fixed_s: float  # launch and host work of a step
    weights_s: float  # reading the weights that every step reads
    token_s: float  # arithmetic for one token in a decode step
    prefill_token_s: float
    context_token_s: float = 0.0  # reading the KV cache of one token
    expert_weights_s: float = 0.0  # reading all experts
    expert_share: float = 1.0  # experts that one token uses ÷ experts
    eager_s: float = 0.0  # added to a step that no captured CUDA graph fits


@dataclass(frozen=True, slots=True)
class Draft:
    """One drafter: its cost and what the target accepts of it.

    `position_rates[category][i]` is the marginal rate of position i: the share of *all* decode steps in which it is accepted,
    as an expectation over requests. `dispersion` (0..1) is how much of a step's luck belongs to its request: the normal score
    of a step is √d · (the request's) + √(1−d) · (the step's own), so the marginal rates hold for any d. Pooled over steps they
    come out lower where d > 0, because an unlucky request needs more steps for the same tokens.

    The rates are those at the largest K. At a smaller K steps begin at other places in the text, and more of a stretch that is easy to
    draft is accepted: log τ(K) is that of the first K rates and `stretch` · log τ(K_max) · (1 − K ÷ K_max).
    """

    position_rates: Mapping[str, tuple[float, ...]]  # by request category; "default" for the others
    dispersion: float = 0.0
    draft_rate: float = 1.0  # share of decode steps that have a draft at all (n-gram, suffix)
    parallel: bool = False  # one draft pass for all K positions, instead of K passes
    step_fixed_s: float = 0.0  # added to every step with a draft
    pass_s: float = 0.0  # one draft pass: launch and weights
    draft_token_s: float = 0.0  # for each sequence and position
    stretch: float = 0.0  # n-gram on real text 0.2 to 0.35, a model's draft 0.02 to 0.05

    def __post_init__(self) -> None:
        if DEFAULT_CATEGORY not in self.position_rates:
            raise ValueError(f"position_rates needs the category '{DEFAULT_CATEGORY}'")
        for category, rates in self.position_rates.items():
            if any(not 0.0 <= rate <= self.draft_rate for rate in rates):
                raise ValueError(f"position_rates of '{category}' must lie in 0..draft_rate")
            if any(later > earlier for earlier, later in pairwise(rates)):
                raise ValueError(f"position_rates of '{category}' must not increase: they are marginal")

    def rates(self, k: int, category: str = DEFAULT_CATEGORY) -> tuple[float, ...]:
        """Marginal rates of the first `k` positions when `k` tokens are drafted."""
        deepest = self.position_rates[category]
        first, gained = deepest[:k], math.fsum(deepest[:k])
        if not self.stretch or not gained:
            return first
        excess = self.stretch * math.log1p(math.fsum(deepest)) * (1 - k / len(deepest))
        by = ((1 + gained) * math.exp(excess) - 1) / gained
        return tuple(min(rate * by, self.draft_rate) for rate in first)

    def cost_s(self, batch: int, k: int) -> float:
        """Seconds of one draft for `batch` sequences."""
        passes = 1 if self.parallel else k
        return self.step_fixed_s + passes * self.pass_s + batch * k * self.draft_token_s


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler may do."""

    max_num_seqs: int = 64
    max_batched_tokens: int = 8192  # tokens in one step, prefill and decode together
    chunked_prefill: bool = True
    prefix_caching: bool = True
    kv_capacity_tokens: int = 500_000
    kv_block_tokens: int = 16  # granularity of prefix hits
    graph_batches: tuple[int, ...] = ()  # captured batch sizes, rising; a batch is padded to the next; empty: no padding
    graph_max_tokens: int | None = None  # a decode step that verifies more tokens than this fits no captured graph
    max_model_len: int = 131_072

    def __post_init__(self) -> None:
        if list(self.graph_batches) != sorted(self.graph_batches):
            raise ValueError("graph_batches must rise")


@dataclass(frozen=True, slots=True)
class Noise:
    """Multiplies step times by factors of mean 1 (log-normal) and by what the machine does, and stalls some steps. All neutral:
    deterministic."""

    step_sigma: float = 0.0
    run_sigma: float = 0.0  # one factor for a server's life: what differs between two starts
    drift_per_hour: float = 0.0  # 0.1: steps take 10 % longer after an hour
    stall_share: float = 0.0  # share of steps that are held up by `stall_s`: a heavy tail
    stall_s: float = 0.0
    slow_phase: tuple[float, float, float] | None = None  # (from, to, factor), seconds: the machine is busy with something else


@dataclass(frozen=True, slots=True)
class World:
    name: str
    target: TargetCost
    note: str = ""  # sources, fitted constants, and what it does not reproduce
    drafts: Mapping[str, Draft] = field(default_factory=dict)  # by variant
    limits: Limits = field(default_factory=Limits)
    noise: Noise = field(default_factory=Noise)
    natural_output_tokens: int | None = None  # mean length of a natural stop; None: every request runs to its max_tokens
    startup_s: float = 0.0
    seed: int = 0

    def check(self, variant: str, k: int) -> str | None:
        """Why this variant cannot run in this world; None if it can."""
        if variant == "off":
            return None if k == 0 else f"off has K = 0, not {k}"
        if variant not in self.drafts:
            have = ", ".join(["off", *sorted(self.drafts)])
            return f"world '{self.name}' has no variant '{variant}': it has {have}"
        deepest = min(len(rates) for rates in self.drafts[variant].position_rates.values())
        return None if 1 <= k <= deepest else f"world '{self.name}' knows {variant} for K = 1..{deepest}, not {k}"


def step_cost(world: World, variant: str, k: int, *, batch: int, prefill_tokens: int = 0) -> tuple[float, float]:
    """Cost of one engine step that decodes `batch` sequences, without noise.

    Returns:
        (seconds, seconds for each token of context that the decoded sequences have)
    """
    cost, draft = world.target, world.drafts.get(variant)
    padded, eager = batch, False
    if batch and world.limits.graph_batches:
        captured, most = world.limits.graph_batches, world.limits.graph_max_tokens
        at = bisect_left(captured, batch)
        eager = at == len(captured) or prefill_tokens > 0 or (most is not None and captured[at] * (1 + k) > most)
        padded = batch if eager else captured[at]
    # A drafter that drafts in only some steps verifies that many fewer tokens, on average.
    tokens = padded * (1 + k * (draft.draft_rate if draft else 1.0))
    touched = 1.0 - (1.0 - cost.expert_share) ** (tokens + prefill_tokens)
    seconds = (
        cost.fixed_s
        + cost.weights_s
        + cost.expert_weights_s * touched
        + cost.token_s * tokens
        + cost.prefill_token_s * prefill_tokens
        + (cost.eager_s if eager else 0.0)
    )
    if draft is not None and batch:
        seconds += draft.draft_rate * draft.cost_s(padded, k)
    return seconds, cost.context_token_s


def expected_tau(draft: Draft, k: int, category: str = DEFAULT_CATEGORY) -> float:
    """1 + Σ m_i: tokens per decode step, in expectation over requests."""
    return 1.0 + math.fsum(draft.rates(k, category))


_ADAPTER = pydantic.TypeAdapter(World)


def load_world(source: str) -> World:
    """A preset by name, or a world from a JSON file with the fields of `World`.

    Raises:
        ConfigError: no such preset or file, or a field that does not fit.
    """
    from backends.simulated.presets import PRESETS

    if source in PRESETS:
        return PRESETS[source]()
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"no world '{source}': give a JSON file or one of {', '.join(PRESETS)}")
    try:
        world = _ADAPTER.validate_json(path.read_bytes())
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise ConfigError(f"{path}: {where}: {first['msg']}") from None
    unknown = set(world.drafts) - set(VARIANTS)
    if unknown:
        raise ConfigError(f"{path}: drafts: unknown variant '{min(unknown)}': choose from {', '.join(VARIANTS)}")
    return world


def dump_world(world: World) -> str:
    """The JSON that `load_world` reads."""
    return _ADAPTER.dump_json(world, indent=2).decode()


def with_limits(world: World, **changes: object) -> World:
    """The same world under other limits."""
    return replace(world, limits=replace(world.limits, **changes))  # type: ignore[arg-type]  # names are those of Limits
