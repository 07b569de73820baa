"""Brackets the capacity of off and of a finalist: the trace replayed at rates around the one that its closed loops predict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from backends.types import ServingConfig
from harness.capacity import REPLAYS, ceiling, demand, next_rate
from harness.findings import Findings
from harness.lab import Lab
from harness.provision import open_loops, points_of
from harness.types import CAPACITY_STAGE, Load
from workloads.types import Trace


def bracket_capacity(
    lab: Lab,
    findings: Findings,
    config: ServingConfig,
    traces: Mapping[str, Trace],
    requests: Mapping[str, Sequence[int]],
    stop: Callable[[], bool],
) -> None:
    """Replay `requests` of each trace with arrivals at a few rates, on off and then on `config`, until one passes and one fails.

    The trials are found again by their stage: `harness.provision`.
    """
    for server in (config.off(), config):
        for name, trace in traces.items():
            asked = demand(trace.arrivals_s[list(requests[name])])
            predicted = ceiling(points_of(findings, name, server), findings.settings.slo).predicted_rps
            if asked is None or predicted is None:
                continue
            for _ in range(REPLAYS):
                rate = next_rate(open_loops(findings, trace, server), predicted)
                if rate is None or stop():
                    break
                load = Load(mode="trace", trace=name, time_scale=asked.mean_rps / rate)
                if not lab.run(server, load, requests[name], "confirm", CAPACITY_STAGE).measured:
                    break  # the same load would fail again
