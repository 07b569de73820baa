"""The grid: every server configuration the run may try, those refused before any start, and how servers and loads make cells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from backends.registry import ADAPTERS
from backends.types import NEEDS_DRAFT, ServingConfig, WorkloadFacts
from harness.settings import RunSettings

_AXES = ("weight_quantization", "kv_cache_dtype")


@dataclass(frozen=True, slots=True)
class Space:
    """`groups` are servers that differ only in speculation: each is compared with its own `off`."""

    offs: tuple[ServingConfig, ...]
    candidates: tuple[ServingConfig, ...]
    infeasible: tuple[tuple[ServingConfig, str], ...]
    batch_sizes: tuple[int, ...]

    @property
    def servers(self) -> tuple[ServingConfig, ...]:
        return self.offs + self.candidates

    @property
    def cells(self) -> int:
        return len(self.servers) * len(self.batch_sizes)


def group_key(config: ServingConfig) -> tuple[str, str, str]:
    """Configurations with equal keys differ only in speculation."""
    return config.backend, config.weight_quantization, config.kv_cache_dtype


def group_label(config: ServingConfig) -> str:
    label = f"{config.backend}, weights {config.weight_quantization}"
    return label if config.kv_cache_dtype == "auto" else f"{label}, KV cache {config.kv_cache_dtype}"


def build_space(settings: RunSettings, model: str, facts: WorkloadFacts) -> Space:
    """Enumerate the grid of `settings` in a fixed order (off first in each group) and ask each adapter what it refuses."""
    offs: list[ServingConfig] = []
    candidates: list[ServingConfig] = []
    infeasible: list[tuple[ServingConfig, str]] = []
    for config in _configurations(settings, model):
        reason = ADAPTERS[config.backend].supports(config, facts)
        if reason:
            infeasible.append((config, reason))
        elif config.variant == "off":
            offs.append(config)
        else:
            candidates.append(config)
    alive = {group_key(off) for off in offs}
    for config in [c for c in candidates if group_key(c) not in alive]:
        candidates.remove(config)
        infeasible.append((config, "its baseline without speculation cannot run"))
    return Space(tuple(offs), tuple(candidates), tuple(infeasible), settings.batch_sizes)


def endpoint_space(settings: RunSettings, backend: str) -> Space:
    """The settings behind servers that already run: off, and each other with the K that the user says it runs with."""
    base = ServingConfig(backend=backend, model=settings.model, max_num_seqs=settings.max_num_seqs)
    on = [
        ServingConfig.from_dict({**base.to_dict(), "variant": variant, "k": settings.k[0]})
        for variant in settings.endpoints
        if variant != "off"
    ]
    return Space((base,), tuple(on), (), settings.batch_sizes)


def _configurations(settings: RunSettings, model: str) -> Iterator[ServingConfig]:
    for backend, quantization, kv_dtype in product(settings.backends, settings.quantization, settings.kv_cache_dtype):
        base = ServingConfig(
            backend=backend,
            model=model,
            weight_quantization=quantization,
            kv_cache_dtype=kv_dtype,
            tensor_parallel=settings.tensor_parallel,
            max_num_seqs=settings.max_num_seqs,
            extra={"trust_remote_code": True} if settings.trust_remote_code else {},
        )
        base = _as_in_production(base, settings.base_args.get(backend, ()))
        yield base  # off is always measured, asked for or not: nothing can be judged without it
        for variant in settings.variants:
            if variant != "off":
                yield from _speculative(settings, base, variant)


def _as_in_production(config: ServingConfig, base_args: tuple[str, ...]) -> ServingConfig:
    """`config` with what the user's production flags set, so that off is production; an axis value that was asked for stays."""
    read = getattr(ADAPTERS[config.backend], "base_settings", None)
    fields = read(base_args) if read and base_args else {}
    asked = {name: value for name, value in config.to_dict().items() if name in _AXES and value not in ("none", "auto")}
    return ServingConfig.from_dict({**config.to_dict(), **fields, **asked})


def _speculative(settings: RunSettings, base: ServingConfig, variant: str) -> Iterator[ServingConfig]:
    draft = settings.drafts.get(variant)
    draft_quantizations = settings.draft_quantization if variant in NEEDS_DRAFT else ("none",)
    for k, topk, draft_quantization in product(settings.k, settings.topk, draft_quantizations):
        for nodes in settings.tree_nodes if topk > 1 else (None,):
            fields = {**base.to_dict(), "variant": variant, "k": k, "topk": topk, "num_draft_tokens": nodes}
            yield ServingConfig.from_dict({**fields, "draft": draft, "draft_quantization": draft_quantization})
