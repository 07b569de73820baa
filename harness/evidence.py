"""From trials to the evidence of `harness.decide`: pairs trials on their requests and weighs batch sizes by the trace's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from backends.types import ServingConfig
from harness.decide import BatchEvidence, Evidence, Ratio
from harness.replicates import MIN_PAIRS, replayed_speedup, speedup_of_runs, throughput_of_runs
from harness.space import group_key
from harness.store import Trial
from harness.types import CAPACITY_STAGE

RecordsOf = Callable[[Trial], pa.Table]


def batch_shares(records: pa.Table) -> dict[int, float]:
    """Share of busy time spent at each number of requests in service, from one open-loop replay.

    A request is in service from the moment it was sent to its last token; idle time does not count.
    """
    starts = records["sent_s"].to_numpy(zero_copy_only=False).astype(float)
    ends = records["last_token_s"].to_numpy(zero_copy_only=False).astype(float)
    known = ~(np.isnan(starts) | np.isnan(ends))
    times = np.concatenate([starts[known], ends[known]])
    steps = np.concatenate([np.ones(known.sum()), -np.ones(known.sum())])
    order = np.lexsort((steps, times))
    times, level = times[order], np.cumsum(steps[order]).astype(int)
    shares: dict[int, float] = {}
    for width, count in zip(np.diff(times), level[:-1], strict=True):
        if count > 0 and width > 0:
            shares[int(count)] = shares.get(int(count), 0.0) + float(width)
    total = sum(shares.values())
    return {batch: width / total for batch, width in sorted(shares.items())} if total else {}


def weights_of(shares: Mapping[int, float], batch_sizes: Sequence[int]) -> dict[int, float]:
    """Each share moved to the nearest measured batch size on a log scale; equal weights where no shares are known."""
    if not shares:
        return {batch: 1.0 / len(batch_sizes) for batch in batch_sizes}
    weights = dict.fromkeys(batch_sizes, 0.0)
    for batch, share in shares.items():
        weights[min(batch_sizes, key=lambda b: (abs(math.log(b / batch)), b))] += share
    return weights


def closed_trials(trials: Sequence[Trial], trace: str, config: ServingConfig, stage: str) -> dict[int, list[Trial]]:
    """The measured closed-loop trials of one configuration, by batch size, in the order they ran. A stage that is repeated
    (`confirm1`, `confirm2`, ...) gives several."""
    found: dict[int, list[Trial]] = {}
    for t in trials:
        wanted = t.measured and t.config == config and t.load.mode == "closed" and t.load.trace == trace
        if wanted and t.load.concurrency and t.stage.rstrip("0123456789") == stage:
            found.setdefault(t.load.concurrency, []).append(t)
    return found


def pair(offs: Sequence[Trial], ons: Sequence[Trial], objective: str, records_of: RecordsOf) -> BatchEvidence:
    """Evidence of one batch size, on the requests that both sides completed: the n-th run of one with the n-th of the other."""
    runs = min(len(offs), len(ons))
    off, on = offs[-1], ons[-1]
    off_records, on_records = ([records_of(t) for t in side[-runs:]] for side in (offs, ons))
    p95 = speedup_of_runs(off_records, on_records, "e2e_s", 0.95)
    throughput = throughput_of_runs(off_records, on_records)
    return BatchEvidence(
        batch_size=on.load.concurrency or 0,
        speedup=_speedup(off, on, off_records, on_records, objective),
        e2e_p95=Ratio.of(p95),
        throughput=Ratio.of(throughput),
        tau=on.speculation["tau"] if on.speculation else None,
        tpot_off_s=_median(off, "tpot_s"),
        tpot_on_s=_median(on, "tpot_s"),
        drafted_share=_drafted_share(on),
        tau_drafted=on.speculation["tau_drafted"] if on.speculation else None,
    )


def _drafted_share(on: Trial) -> float | None:
    spec = on.speculation
    return spec["drafted_steps"] / spec["verify_steps"] if spec and spec["verify_steps"] and spec["drafted_steps"] else None


QUANTILES = {"e2e_p50": ("e2e_s", 0.5), "e2e_p95": ("e2e_s", 0.95), "tpot_p50": ("tpot_s", 0.5)}


def _speedup(off: Trial, on: Trial, off_records: Sequence[pa.Table], on_records: Sequence[pa.Table], objective: str) -> Ratio:
    if objective in QUANTILES:
        return Ratio.of(speedup_of_runs(off_records, on_records, *QUANTILES[objective]))
    if objective == "goodput":  # a count against SLOs: a ratio without an interval
        return Ratio(math.exp(-(log_ratio(on, off, objective) or 0.0)), None)
    return Ratio.of(throughput_of_runs(off_records, on_records))


def log_ratio(trial: Trial, baseline: Trial, objective: str) -> float | None:
    """log(objective of `trial` ÷ of `baseline`), turned so that smaller is better; None where either is unknown or 0."""

    def value(t: Trial) -> float | None:
        if t.metrics is None:
            return None
        if objective in QUANTILES:
            name, _ = QUANTILES[objective]
            summary = t.metrics[name]
            return summary[objective.rsplit("_", 1)[1]] if summary else None
        return t.metrics["goodput_rps" if objective == "goodput" else "output_tokens_per_s"]

    new, old = value(trial), value(baseline)
    if not new or not old:
        return None
    return math.log(new / old) if objective in QUANTILES else math.log(old / new)


def _median(trial: Trial, metric: str) -> float | None:
    summary = trial.metrics[metric] if trial.metrics else None
    return summary["p50"] if summary else None


def by_batch(
    trials: Sequence[Trial], trace: str, on: ServingConfig, stages: tuple[str, str], objective: str, records_of: RecordsOf
) -> tuple[BatchEvidence, ...]:
    """`on` against its own off at every batch size measured for both; `stages` names where off and on were measured."""
    offs = closed_trials(trials, trace, on.off(), stages[0])
    ons = closed_trials(trials, trace, on, stages[1])
    return tuple(pair(offs[b], ons[b], objective, records_of) for b in sorted(offs.keys() & ons.keys()))


def score(evidence: Sequence[BatchEvidence], weights: Mapping[int, float]) -> float:
    """Mean log speed-up over the trace's batch sizes: what the search compares configurations by. -inf where nothing is known."""
    total = sum(weights.get(e.batch_size, 0.0) for e in evidence)
    if not total:
        return float("-inf")
    return sum(weights.get(e.batch_size, 0.0) * math.log(e.speedup.value) for e in evidence) / total


def best_k(speedups: Mapping[tuple[ServingConfig, int], float], finalist: ServingConfig) -> tuple[tuple[int, int], ...]:
    """For each batch size the K of the finalist's variant with the best speed-up (0 where none beats off); ties go to smaller K.

    `speedups`: (configuration, batch size) -> over off.
    """
    best: dict[int, tuple[float, int]] = {}
    for (config, batch), value in speedups.items():
        if group_key(config) != group_key(finalist) or config.variant != finalist.variant or config.topk != finalist.topk:
            continue
        speed, k = best.get(batch, (1.0, 0))
        if value > speed * 1.01 or (value > speed / 1.01 and 0 < config.k < k):
            best[batch] = (value, config.k)
        else:
            best.setdefault(batch, (speed, k))
    return tuple((batch, k) for batch, (_, k) in sorted(best.items()))


def open_loop(
    trials: Sequence[Trial], trace: str, off: ServingConfig, on: ServingConfig, records_of: RecordsOf
) -> tuple[Ratio | None, Ratio | None]:
    """E2E p50 and p95, off ÷ on, at the trace's own load: the n-th replay of one against the n-th of the other."""

    def replays(config: ServingConfig) -> list[pa.Table]:
        return [
            records_of(t)
            for t in trials
            if t.measured
            and t.config == config
            and (t.load.mode, t.load.trace) == ("trace", trace)
            and t.stage != CAPACITY_STAGE
        ]

    offs, ons = replays(off), replays(on)
    pairs = min(len(offs), len(ons))
    if not pairs:
        return None, None
    p50, p95 = (replayed_speedup(offs[-pairs:], ons[-pairs:], "e2e_s", q) for q in (0.5, 0.95))
    return Ratio.of(p50), Ratio.of(p95)


def evidence_of(
    finalist: ServingConfig,
    trials: Sequence[Trial],
    trace: str,
    *,
    objective: str,
    search_evidence: Mapping[ServingConfig, Sequence[BatchEvidence]],
    estimates: Mapping[tuple[ServingConfig, int], float],
    shares: Mapping[int, float],
    drift: float,
    records_of: RecordsOf,
) -> Evidence:
    """Everything `decide.judge` needs about the finalist of one group.

    From confirmation trials only, where there are any. The schedule compares all K that were measured, so it is from the search, and
    at their other batch sizes from `estimates` of the speed-up by (configuration, batch size).
    """
    rows = by_batch(trials, trace, finalist, ("confirm", "confirm"), objective, records_of)
    rows = rows or tuple(search_evidence.get(finalist, ()))
    repeated = {len(runs) for runs in closed_trials(trials, trace, finalist, "confirm").values()}
    if repeated and min(repeated) >= MIN_PAIRS:
        drift = 1.0  # what the machine does by itself is in an interval over interleaved runs already
    p50, p95 = open_loop(trials, trace, finalist.off(), finalist, records_of)
    speedups = {(config, row.batch_size): row.speedup.value for config, found in search_evidence.items() for row in found}
    speedups |= {cell: value for cell, value in estimates.items() if cell[0] in search_evidence}
    return Evidence(
        config=finalist,
        by_batch=rows,
        weights=weights_of(shares, [r.batch_size for r in rows]) if rows else {},
        mean_batch=sum(b * s for b, s in shares.items()) if shares else None,
        open_e2e_p50=p50,
        open_e2e_p95=p95,
        schedule=best_k(speedups, finalist),
        metric=objective,
        drift=drift,
    )
