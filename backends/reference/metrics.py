"""The engine's counters as a Prometheus text page."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from backends.reference.engine import Engine

COUNTERS = {
    "generated_tokens": "Tokens emitted",
    "first_tokens": "Sequences that emitted their first token",
    "decode_steps": "Steps of a sequence past its first token, drafted or not",
    "drafted_steps": "Those with a draft",
    "draft_tokens": "Tokens drafted",
    "accepted_tokens": "Draft tokens emitted",
    "engine_steps": "Steps in which a sequence decoded",
    "prompt_tokens": "Prompt tokens computed or taken over, once for each request",
    "prefix_query_tokens": "Prompt tokens of requests that were given a slot",
    "prefix_hit_tokens": "Those of them that another request had computed",
    "preemptions": "Sequences that lost their KV rows and were recomputed",
}


def render(engine: Engine, model: str) -> str:
    """The page of this moment."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(engine, model))
    return generate_latest(registry).decode()


class _Collector:
    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"spectune:{name}", text, value=getattr(engine.counters, name))
        positions = CounterMetricFamily(
            "spectune:accepted_tokens_per_position", "Steps in which this draft position was accepted", labels=["position"]
        )
        for position, value in enumerate(engine.counters.accepted_per_position):
            positions.add_metric([str(position)], value)
        yield positions
        gauges: dict[str, tuple[str, float]] = {
            "requests_running": ("Sequences with a slot", len(engine.scheduler.running)),
            "requests_waiting": ("Sequences without one", len(engine.scheduler.waiting)),
            "kv_capacity_tokens": ("KV rows that running sequences may fill", engine.capacity_tokens),
            "kv_use_ratio": ("Share of them filled", engine.kv_use_ratio),
        }
        for name, (text, level) in gauges.items():
            yield GaugeMetricFamily(f"spectune:{name}", text, value=level)
        yield GaugeMetricFamily("process_start_time_seconds", "Unix time", value=psutil.Process().create_time())
        settings = {"served_model": self._model, **engine.resolved()}
        info = GaugeMetricFamily("spectune:settings_info", "Settings in effect, as labels", labels=list(settings))
        info.add_metric([str(value) for value in settings.values()], 1)
        yield info
