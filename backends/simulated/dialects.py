"""Statistics pages as the engines write them, from the same counts: the reverse of `backends.counters`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from backends.types import Gauges, SpecCounters


@dataclass(frozen=True, slots=True)
class Reading:
    """One engine at one moment. Every count is known here, so none is None."""

    counters: SpecCounters
    gauges: Gauges
    ttft_sum_s: float
    chunk_gap_sum_s: float
    kv_capacity_tokens: int


@dataclass(frozen=True, slots=True)
class Server:
    model: str
    spec_series: bool  # whether the page speaks of speculation
    start_s: float  # Unix time


Row = tuple[str, str, str, float | None]  # kind, series name, labels beside the engine's, value


def _spectune(e: Reading, server: Server) -> Iterator[Row]:
    c = e.counters
    for name in ("generated_tokens", "first_tokens", "decode_steps", "prompt_tokens", "prefix_hit_tokens"):
        yield "counter", f"spectune:{name}_total", "", getattr(c, name)
    for name in ("prefix_query_tokens", "preemptions", "engine_steps"):
        yield "counter", f"spectune:{name}_total", "", getattr(c, name)
    if server.spec_series:
        for name in ("drafted_steps", "draft_tokens", "accepted_tokens"):
            yield "counter", f"spectune:{name}_total", "", getattr(c, name)
        for i, count in enumerate(c.accepted_per_position or ()):
            yield "counter", "spectune:accepted_tokens_per_position_total", f'position="{i}"', count
    yield "gauge", "spectune:requests_running", "", e.gauges.running
    yield "gauge", "spectune:requests_waiting", "", e.gauges.waiting
    yield "gauge", "spectune:kv_use_ratio", "", e.gauges.kv_use
    yield "gauge", "spectune:kv_capacity_tokens", "", e.kv_capacity_tokens


def _histogram(name: str, count: int | None, total: float) -> Iterator[Row]:
    yield "histogram", f"{name}_bucket", 'le="+Inf"', count
    yield "histogram", f"{name}_count", "", count
    yield "histogram", f"{name}_sum", "", total


def _vllm(e: Reading, server: Server) -> Iterator[Row]:
    c = e.counters
    counts = {
        "generation_tokens": c.generated_tokens,
        "prompt_tokens": c.prompt_tokens,
        "prefix_cache_queries": c.prefix_query_tokens,
        "prefix_cache_hits": c.prefix_hit_tokens,
        "num_preemptions": c.preemptions,
    }
    if server.spec_series:
        counts |= {
            "spec_decode_num_drafts": c.drafted_steps,
            "spec_decode_num_draft_tokens": c.draft_tokens,
            "spec_decode_num_accepted_tokens": c.accepted_tokens,
        }
        for i, count in enumerate(c.accepted_per_position or ()):
            yield "counter", "vllm:spec_decode_num_accepted_tokens_per_pos_total", f'position="{i}"', count
    for name, value in counts.items():
        yield "counter", f"vllm:{name}_total", "", value
        yield "gauge", f"vllm:{name}_created", "", server.start_s
    yield from _histogram("vllm:time_to_first_token_seconds", c.first_tokens, e.ttft_sum_s)
    yield from _histogram("vllm:inter_token_latency_seconds", c.decode_steps, e.chunk_gap_sum_s)
    yield "gauge", "vllm:num_requests_running", "", e.gauges.running
    yield "gauge", "vllm:num_requests_waiting", "", e.gauges.waiting
    yield "gauge", "vllm:kv_cache_usage_perc", "", e.gauges.kv_use
    yield "gauge", "vllm:cache_config_info", f'block_size="16",num_gpu_blocks="{e.kv_capacity_tokens // 16}"', 1.0


def _sglang(e: Reading, server: Server) -> Iterator[Row]:
    c = e.counters
    counts = {
        "generation_tokens": c.generated_tokens,
        "prompt_tokens": c.prompt_tokens,
        "cached_tokens": c.prefix_hit_tokens,
        "num_retracted_requests": c.preemptions,
    }
    if server.spec_series:
        counts["spec_verify_calls"] = c.decode_steps
    for name, value in counts.items():
        yield "counter", f"sglang:{name}_total", "", value
    yield "gauge", "sglang:spec_accept_length", "", c.tau or 0.0 if server.spec_series else 0.0
    yield from _histogram("sglang:time_to_first_token_seconds", c.first_tokens, e.ttft_sum_s)
    yield "gauge", "sglang:num_running_reqs", "", e.gauges.running
    yield "gauge", "sglang:num_queue_reqs", "", e.gauges.waiting
    yield "gauge", "sglang:token_usage", "", e.gauges.kv_use
    yield "gauge", "sglang:max_total_num_tokens", "", e.kv_capacity_tokens


def _tensorrt_llm(e: Reading, server: Server) -> Iterator[Row]:
    c = e.counters
    yield "counter", "trtllm_generation_tokens_total", "", c.generated_tokens
    yield "counter", "trtllm_prompt_tokens_total", "", c.prompt_tokens
    if server.spec_series and c.accepted_per_position is not None:
        yield "counter", "trtllm_spec_decode_num_draft_tokens_total", "", c.draft_tokens
        yield "counter", "trtllm_spec_decode_num_accepted_tokens_total", "", c.accepted_tokens
        for i, count in enumerate(c.accepted_per_position):
            yield "counter", "trtllm_spec_decode_drafted_tokens_total", f'token_position="{i}"', c.drafted_steps
            yield "counter", "trtllm_spec_decode_accepted_tokens_total", f'token_position="{i}"', count
    yield from _histogram("trtllm_time_to_first_token_seconds", c.first_tokens, e.ttft_sum_s)
    yield "gauge", "trtllm_num_requests_running", "", e.gauges.running
    yield "gauge", "trtllm_num_requests_waiting", "", e.gauges.waiting
    yield "gauge", "trtllm_kv_cache_utilization", "", e.gauges.kv_use


@dataclass(frozen=True, slots=True)
class Dialect:
    rows: Callable[[Reading, Server], Iterator[Row]]
    labels: str  # of every series, with {engine} and {model} to fill in
    path: str = "/metrics"


DIALECTS: Mapping[str, Dialect] = {
    "spectune": Dialect(_spectune, 'engine="{engine}"'),
    "vllm": Dialect(_vllm, 'engine="{engine}",model_name="{model}"'),
    "sglang": Dialect(_sglang, 'dp_rank="{engine}",engine_type="unified",model_name="{model}"'),
    "tensorrt_llm": Dialect(_tensorrt_llm, 'engine_type="{engine}",model_name="{model}"', path="/prometheus/metrics"),
}
"""Whose pages a simulated server can speak."""


def statistics_page(dialect: Dialect, server: Server, engines: Sequence[Reading]) -> str:
    """The Prometheus text page."""
    families: dict[str, list[str]] = {}
    for index, engine in enumerate(engines):
        own = dialect.labels.format(engine=index, model=server.model)
        for kind, name, labels, value in dialect.rows(engine, server):
            family = families.setdefault(name, [] if kind == "histogram" else [f"# TYPE {name} {kind}"])
            family.append(f"{name}{{{own}{',' if labels else ''}{labels}}} {float(value or 0)}")
    lines = [line for family in families.values() for line in family]
    return "\n".join([*lines, f"process_start_time_seconds {server.start_s}", ""])


def iteration_page(engines: Sequence[Reading]) -> str:
    """TensorRT-LLM's ``/metrics``: a JSON list of iteration statistics, here of the present moment only."""
    rows = [
        {
            "numActiveRequests": e.gauges.running,
            "numQueuedRequests": e.gauges.waiting,
            "kvCacheStats": {
                "usedNumBlocks": round((e.gauges.kv_use or 0.0) * e.kv_capacity_tokens / 32),
                "maxNumBlocks": e.kv_capacity_tokens // 32,
            },
        }
        for e in engines
    ]
    return json.dumps(rows)
