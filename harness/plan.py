"""What a run will cost before it starts: server starts, loads, and minutes from stated assumptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.capacity import REPLAYS
from harness.funnel.acceptance import draft_key
from harness.settings import RunSettings
from harness.space import Space, group_key
from workloads.types import Trace

ASSUMED_STARTUP_S: Mapping[str, float] = {
    "reference": 6.0,
    "simulated": 2.0,
    "vllm": 60.0,
    "sglang": 60.0,
    "tensorrt_llm": 180.0,
}
ASSUMED_TOKENS_PER_S = 25.0
"""Output tokens per second of one sequence where nothing was measured yet: the demo model on two CPU cores; a GPU is faster."""
ASSUMED_BATCH_GAIN = 0.6
"""Throughput grows as batch size to this power, where nothing was measured yet."""


@dataclass(frozen=True, slots=True)
class Plan:
    servers: int
    search_loads: int
    baseline_loads: int
    confirm_loads: int
    capacity_loads: int
    server_starts: int
    measured_s: float
    full_grid_s: float

    def lines(self, gpu_hourly_usd: float | None, gpus: int) -> list[str]:
        lines = [
            f"{self.servers} server configurations, {self.server_starts} server starts",
            f"{self.baseline_loads} baseline loads, up to {self.search_loads} search loads, {self.confirm_loads} confirmation loads",
            f"about {self.measured_s / 60:.0f} min (estimate from assumed speeds, not a measurement)",
        ]
        if self.capacity_loads:
            lines[1] += f", up to {self.capacity_loads} replays for the capacity within the limits"
        if gpu_hourly_usd is not None and gpus:
            lines.append(f"about {gpu_hourly_usd * gpus * self.measured_s / 3600:.2f} USD for {gpus} GPUs")
        return lines


SEARCHED_AFTER_PROBES = 3
"""Servers of each group that the funnel measures after its probes: what it took in simulated worlds, in the median."""


def funnel_cells(space: Space, max_cells: int | None) -> int:
    """Cells of a search by the funnel: two loads for each drafter's probe, then a few servers at every batch size."""
    drafters = {(group_key(c), draft_key(c)) for c in space.candidates}
    groups = {group_key(c) for c in space.candidates}
    cells = 2 * len(drafters) + SEARCHED_AFTER_PROBES * len(groups) * len(space.batch_sizes)
    return min(cells, len(space.candidates) * len(space.batch_sizes), max_cells or cells)


def estimate(space: Space, settings: RunSettings, traces: Mapping[str, Trace], search_cells: int) -> Plan:
    """Starts, loads and seconds of the run, and of the full grid with every cell measured at confirmation size."""
    tokens = _output_tokens(settings, traces)
    search = settings.search_requests
    confirm = min(settings.confirm_requests, *(len(t) for t in traces.values()))
    per_batch = {b: tokens / (ASSUMED_TOKENS_PER_S * b**ASSUMED_BATCH_GAIN) for b in space.batch_sizes}
    sweep_s = sum(per_batch.values())  # one request at each batch size
    funnel = settings.strategy == "funnel"
    finalists = len({c.backend for c in space.candidates})
    n = len(traces)
    open_s = settings.replays * sum(_span_s(t, settings, confirm) for t in traces.values())
    drafters = len({(group_key(c), draft_key(c)) for c in space.candidates})
    searched = drafters + SEARCHED_AFTER_PROBES * len(space.offs) if funnel else -(-search_cells // len(space.batch_sizes))
    starts = len(space.offs) + min(searched, len(space.candidates)) + (3 if settings.slo else 2) * finalists
    startup_s = max((ASSUMED_STARTUP_S[c.backend] for c in space.offs), default=0.0)
    baseline_loads = len(space.offs) * len(space.batch_sizes) * n + finalists * n
    confirm_loads = finalists * n * (2 * len(space.batch_sizes) + 2)
    replays = 2 * REPLAYS * finalists * sum(t.known("arrival_s") == len(t) for t in traces.values()) if settings.slo else 0
    measured_s = (
        starts * startup_s
        + len(space.offs) * search * sweep_s * n
        + search_cells * search * sweep_s / len(space.batch_sizes) * n
        + finalists * (2 * confirm + search) * sweep_s * n
        + 2 * finalists * open_s
        + replays * confirm * min(per_batch.values())
    )
    grid_s = len(space.servers) * (startup_s + confirm * sweep_s * n)
    return Plan(len(space.servers), search_cells * n, baseline_loads, confirm_loads, replays, starts, measured_s, grid_s)


def _output_tokens(settings: RunSettings, traces: Mapping[str, Trace]) -> float:
    """Mean output tokens per request, as far as the traces say; 128 where they do not."""
    cap = settings.max_output_tokens or 1 << 30
    counts = [min(r.max_tokens or r.output_tokens or 128, cap) for t in traces.values() for r in t.requests()]
    return sum(counts) / max(len(counts), 1)


def _span_s(trace: Trace, settings: RunSettings, requests: int) -> float:
    arrivals = [r.arrival_s for r in trace.requests()[:requests] if r.arrival_s is not None]
    return (max(arrivals) - min(arrivals)) * settings.time_scale if arrivals else 0.0
