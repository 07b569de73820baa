"""Statistics pages of all engines, read into `SpecCounters` and `Gauges`.

Every count is the sum over the page's series of that name (engines, data-parallel ranks); ``_created`` twins are not counts.
A series that the page lacks is None, and so is one that holds NaN or a line that cannot be read, since a sum that misses a
part is worse than none. A page gives cumulative counts; the increase over a window is ``after - before``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping

from prometheus_client.parser import text_string_to_metric_families

from backends.types import ConfigError, Gauges, SpecCounters

Sample = tuple[Mapping[str, str], float]


class Page:
    """One Prometheus text page, restricted to names that start with `prefix` and the process's start time."""

    def __init__(self, text: str, prefix: str) -> None:
        self.samples: dict[str, list[Sample]] = {}
        for raw in text.split("\n"):
            line = raw.strip()
            if not line.startswith((prefix, "process_start_time_seconds")):
                continue
            # Line by line, so that one bad line spoils one series and not the page. HELP and TYPE are not needed.
            try:
                family = next(iter(text_string_to_metric_families(line)))
                for sample in family.samples:
                    self.samples.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
            except (ValueError, StopIteration):
                name = line.split("{")[0].split()[0]
                self.samples.setdefault(name, []).append(({}, math.nan))

    def values(self, name: str) -> list[float] | None:
        """Every value of a series; None where it is absent or any of its values is no number."""
        values = [value for _, value in self.samples.get(name, [])]
        return values if values and all(map(math.isfinite, values)) else None

    def total(self, *names: str) -> int | None:
        """Sum over all label sets of the first of `names` that the page has."""
        for name in names:
            if name in self.samples:
                values = self.values(name)
                return None if values is None else round(sum(values))
        return None

    def gauge(self, *names: str, mean: bool = False) -> float | None:
        """Sum (or mean) over engines of the first of `names` that the page has."""
        for name in names:
            values = self.values(name)
            if values is not None:
                return sum(values) / (len(values) if mean else 1)
        return None

    def by_position(self, name: str, label: str) -> tuple[int, ...] | None:
        """Sums per draft position, the lowest label first. Ends before the first position that is missing or unreadable."""
        samples = self.samples.get(name, [])
        if not all(labels.get(label, "").isdigit() for labels, _ in samples):
            return None
        sums: dict[int, float] = {}
        for labels, value in samples:
            position = int(labels[label])
            sums[position] = sums.get(position, 0.0) + value
        counts: list[int] = []
        position = min(sums, default=0)
        while position in sums and math.isfinite(sums[position]):
            counts.append(round(sums[position]))
            position += 1
        return tuple(counts) or None

    def start_s(self) -> float | None:
        """Start of the oldest process; where that is not published (vLLM's multi-process mode), its oldest counter's creation.

        The oldest, because a label set that is first used later has a later creation time although nothing restarted.
        """
        values = self.values("process_start_time_seconds")
        if values is None:
            values = [
                v for name, all_ in self.samples.items() if name.endswith("_created") for _, v in all_ if math.isfinite(v)
            ]
        return min(values, default=None)


def _spectune(text: str) -> tuple[SpecCounters, Gauges]:
    page = Page(text, "spectune:")
    counters = SpecCounters(
        generated_tokens=page.total("spectune:generated_tokens_total"),
        first_tokens=page.total("spectune:first_tokens_total"),
        decode_steps=page.total("spectune:decode_steps_total"),
        drafted_steps=page.total("spectune:drafted_steps_total"),
        draft_tokens=page.total("spectune:draft_tokens_total"),
        accepted_tokens=page.total("spectune:accepted_tokens_total"),
        accepted_per_position=page.by_position("spectune:accepted_tokens_per_position_total", "position"),
        prompt_tokens=page.total("spectune:prompt_tokens_total"),
        prefix_hit_tokens=page.total("spectune:prefix_hit_tokens_total"),
        prefix_query_tokens=page.total("spectune:prefix_query_tokens_total"),
        preemptions=page.total("spectune:preemptions_total"),
        engine_steps=page.total("spectune:engine_steps_total"),
        process_start_s=page.start_s(),
    )
    return counters, Gauges(
        running=page.gauge("spectune:requests_running"),
        waiting=page.gauge("spectune:requests_waiting"),
        kv_use=page.gauge("spectune:kv_use_ratio", mean=True),
    )


def _vllm(text: str) -> tuple[SpecCounters, Gauges]:
    """vLLM V1 (0.32 names).

    The inter-token histogram is observed once per request and engine step, so its count is the number of decode steps; the
    draft counters miss the steps without a draft (ngram, suffix) and count tokens accepted past a request's end.
    """
    page = Page(text, "vllm:")
    counters = SpecCounters(
        generated_tokens=page.total("vllm:generation_tokens_total"),
        first_tokens=page.total("vllm:time_to_first_token_seconds_count"),
        decode_steps=page.total("vllm:inter_token_latency_seconds_count"),
        drafted_steps=page.total("vllm:spec_decode_num_drafts_total"),
        draft_tokens=page.total("vllm:spec_decode_num_draft_tokens_total"),
        accepted_tokens=page.total("vllm:spec_decode_num_accepted_tokens_total"),
        accepted_per_position=page.by_position("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position"),
        prompt_tokens=page.total("vllm:prompt_tokens_total"),
        prefix_hit_tokens=page.total("vllm:prefix_cache_hits_total"),
        prefix_query_tokens=page.total("vllm:prefix_cache_queries_total"),
        preemptions=page.total("vllm:num_preemptions_total"),
        process_start_s=page.start_s(),
    )
    return counters, Gauges(
        running=page.gauge("vllm:num_requests_running"),
        waiting=page.gauge("vllm:num_requests_waiting"),
        kv_use=page.gauge("vllm:kv_cache_usage_perc", mean=True),
    )


def _sglang(text: str) -> tuple[SpecCounters, Gauges]:
    """SGLang 0.5.

    Acceptance is published as gauges over the last log window, which are not read. A verification call is counted per request,
    so with speculation every decode step is one. Counters move when a request ends: read them after the load has drained.
    """
    page = Page(text, "sglang:")
    verify_calls = page.total("sglang:spec_verify_calls_total")
    prompt_tokens = page.total("sglang:prompt_tokens_total")
    counters = SpecCounters(
        generated_tokens=page.total("sglang:generation_tokens_total"),
        first_tokens=page.total("sglang:time_to_first_token_seconds_count"),
        decode_steps=verify_calls,
        drafted_steps=verify_calls,
        prompt_tokens=prompt_tokens,
        prefix_hit_tokens=page.total("sglang:cached_tokens_total"),
        prefix_query_tokens=prompt_tokens,
        preemptions=page.total("sglang:num_retracted_requests_total"),
        process_start_s=page.start_s(),
    )
    return counters, Gauges(
        running=page.gauge("sglang:num_running_reqs"),
        waiting=page.gauge("sglang:num_queue_reqs"),
        kv_use=page.gauge("sglang:token_usage", mean=True),
    )


def _tensorrt_llm(text: str) -> tuple[SpecCounters, Gauges]:
    """TensorRT-LLM: ``/prometheus/metrics``. Its ``/metrics`` is a JSON list that reading empties, so it gives gauges only.

    Steps without a draft are not published, so neither are decode steps; a step with a draft drafted its first position. The
    per-position counters come from finished requests, the others from iteration statistics; they are not mixed.
    """
    if text.lstrip().startswith("["):
        return SpecCounters(), _iteration_gauges(text)
    page = Page(text, "trtllm_")
    drafted = page.by_position("trtllm_spec_decode_drafted_tokens_total", "token_position")
    accepted = page.by_position("trtllm_spec_decode_accepted_tokens_total", "token_position")
    block_tokens = page.gauge("trtllm_kv_cache_tokens_per_block", mean=True)
    reused, missed = page.total("trtllm_kv_cache_reused_blocks_total"), page.total("trtllm_kv_cache_missed_blocks_total")
    prefix_hit = prefix_query = None
    if block_tokens is not None and reused is not None and missed is not None:
        prefix_hit, prefix_query = round(reused * block_tokens), round((reused + missed) * block_tokens)
    counters = SpecCounters(
        generated_tokens=page.total("trtllm_generation_tokens_total"),
        first_tokens=page.total("trtllm_time_to_first_token_seconds_count"),
        drafted_steps=drafted[0] if drafted else None,
        draft_tokens=sum(drafted) if drafted else page.total("trtllm_spec_decode_num_draft_tokens_total"),
        accepted_tokens=sum(accepted) if accepted else page.total("trtllm_spec_decode_num_accepted_tokens_total"),
        accepted_per_position=accepted,
        prompt_tokens=page.total("trtllm_prompt_tokens_total"),
        prefix_hit_tokens=prefix_hit,
        prefix_query_tokens=prefix_query,
        process_start_s=page.start_s(),
    )
    return counters, Gauges(
        running=page.gauge("trtllm_num_requests_running"),
        waiting=page.gauge("trtllm_num_requests_waiting"),
        kv_use=page.gauge("trtllm_kv_cache_utilization", mean=True),
    )


def _iteration_gauges(text: str) -> Gauges:
    try:
        last = json.loads(text)[-1]
    except (ValueError, IndexError):
        return Gauges()
    if not isinstance(last, dict):
        return Gauges()
    blocks = last.get("kvCacheStats") or {}
    used, most = blocks.get("usedNumBlocks"), blocks.get("maxNumBlocks")
    return Gauges(
        running=last.get("numActiveRequests"),
        waiting=last.get("numQueuedRequests"),
        kv_use=used / most if used is not None and most else None,
    )


DIALECTS: Mapping[str, Callable[[str], tuple[SpecCounters, Gauges]]] = {
    "reference": _spectune,
    "simulated": _spectune,
    "vllm": _vllm,
    "sglang": _sglang,
    "tensorrt_llm": _tensorrt_llm,
}
"""Whose statistics can be read: one function for each engine."""


def parse_metrics(backend: str, page: str) -> tuple[SpecCounters, Gauges]:
    """Counts and gauges on a statistics page of `backend`.

    Raises:
        ConfigError: no dialect of that name.
    """
    if backend not in DIALECTS:
        raise ConfigError(f"no statistics dialect for backend '{backend}': choose from {', '.join(DIALECTS)}")
    return DIALECTS[backend](page)
