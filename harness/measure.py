"""From the records of one load to its `Measurement`. Failures are counted beside the latencies and never enter them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from harness.replay import Replay
from harness.speculation import speculation
from harness.statistics import Array, Estimate, closed_throughput, groups_of, quantile_estimate
from harness.types import Distribution, Load, Measurement, RequestRecord

SCHEMA = pa.schema(
    [
        ("index", pa.int64()),
        ("status", pa.string()),
        ("failure", pa.string()),
        ("intended_s", pa.float64()),
        ("sent_s", pa.float64()),
        ("first_token_s", pa.float64()),
        ("last_token_s", pa.float64()),
        ("ttft_s", pa.float64()),
        ("tpot_s", pa.float64()),
        ("e2e_s", pa.float64()),
        ("input_tokens", pa.int64()),
        ("output_tokens", pa.int64()),
        ("tokens_source", pa.string()),
        ("finish_reason", pa.string()),
        ("chunk_s", pa.list_(pa.float64())),
        ("chunk_tokens", pa.list_(pa.int32())),
        ("category", pa.string()),
        ("session", pa.string()),
    ]
)
"""`requests.parquet`. `chunk_tokens` is null where it is not known how many tokens each chunk held."""


def records_table(records: Sequence[RequestRecord]) -> pa.Table:
    """One row per request. Latencies of a request that did not complete are null; when its tokens arrived is kept."""

    def value(record: RequestRecord, name: str) -> Any:
        if name in ("ttft_s", "tpot_s", "e2e_s") and record.status != "completed":
            return None
        if name == "chunk_tokens" and len(record.chunk_tokens) != len(record.chunk_s):
            return None
        return getattr(record, name)

    return pa.table({name: [value(r, name) for r in records] for name in SCHEMA.names}, schema=SCHEMA)


def measure(replay: Replay, load: Load, *, slo: Mapping[str, float] | None = None, seed: int = 0) -> Measurement:
    """Percentiles, rates and acceptance of one load, with intervals where this load can carry them.

    `slo` maps names like ``ttft_p95`` to seconds; a request meets them if each of its latencies is within its limit.
    """
    done = [r for r in replay.records if r.status == "completed"]
    closed = load.mode == "closed"
    spec, spec_warnings, spec_invalid = speculation(replay, closed=closed)
    window = replay.window_s[1] - replay.window_s[0]
    throughput = _throughput(done, load, window, seed)
    invalid = replay.invalid or spec_invalid or _sending_problem(replay, load)
    return Measurement(
        requests=_counts(replay.records),
        ttft_s=_distribution(done, lambda r: r.ttft_s, closed=closed, seed=seed),
        tpot_s=_distribution(done, lambda r: r.tpot_s, closed=closed, seed=seed),
        chunk_gap_s=_chunk_gaps(done),
        e2e_s=_distribution(done, lambda r: r.e2e_s, closed=closed, seed=seed),
        output_tokens_per_s=throughput.value if throughput else None,
        requests_per_s=_requests_per_s(done, load, window),
        goodput_rps=None if slo is None or not window else sum(_meets(r, slo) for r in done) / window,
        batch_size=_batch_size(replay),
        prefix_hit_rate=_prefix_hit_rate(replay),
        preemptions=replay.counters.preemptions if replay.counters else None,
        send_lag_s={"p99": _send_lag(replay.records)},
        speculation=spec,
        throughput_ci95=throughput.ci95 if throughput else None,
        window_s=replay.window_s,
        excluded=replay.excluded,
        gpus=replay.gpus,
        invalid=invalid,
        warnings=(*replay.warnings, *spec_warnings, *_token_warnings(replay.records)),
    )


def _counts(records: Sequence[RequestRecord]) -> dict[str, Any]:
    by_status = Counter(r.status for r in records)
    return {
        "sent": len(records),
        "completed": by_status["completed"],
        "failed": by_status["failed"],
        "refused": by_status["refused"],
        "cancelled": by_status["cancelled"],
        "failures": dict(sorted(Counter(r.failure or "unknown" for r in records if r.status != "completed").items())),
    }


def _distribution(
    records: Sequence[RequestRecord], of: Callable[[RequestRecord], float | None], *, closed: bool, seed: int
) -> Distribution | None:
    known = [(value, r.session) for r in records if (value := of(r)) is not None]
    if not known:
        return None
    values = np.asarray([value for value, _ in known])
    p50, p95, p99 = np.quantile(values, [0.5, 0.95, 0.99])
    intervals: list[tuple[float, float] | None] = [None, None]
    if closed:
        groups = groups_of([session for _, session in known])
        intervals = [quantile_estimate(values, q, groups, seed).ci95 for q in (0.5, 0.95)]
    return Distribution(float(p50), float(p95), float(p99), float(values.mean()), *intervals)


def _chunk_gaps(records: Sequence[RequestRecord]) -> Distribution | None:
    """Gaps between chunks of one request. Gaps of one request are not independent, so they get no interval."""
    gaps = [np.diff(r.chunk_s) for r in records if len(r.chunk_s) > 1]
    if not gaps:
        return None
    values = np.concatenate(gaps)
    p50, p95, p99 = np.quantile(values, [0.5, 0.95, 0.99])
    return Distribution(float(p50), float(p95), float(p99), float(values.mean()), None, None)


def _slot_time(records: Sequence[RequestRecord]) -> tuple[Array, Array, list[str | None]]:
    known = [(r.output_tokens, r.e2e_s, r.session) for r in records if r.output_tokens is not None and r.e2e_s is not None]
    tokens, times = (np.asarray([row[i] for row in known], dtype=float) for i in (0, 1))
    return tokens, times, [row[2] for row in known]


def _throughput(records: Sequence[RequestRecord], load: Load, window_s: float, seed: int) -> Estimate | None:
    """Output tokens per second. Closed loop: concurrency × Σ tokens ÷ Σ time in the slot, which is the rate while all slots are
    busy, without ramp-up and drain. Open loop: tokens ÷ window; no interval from one replay.
    """
    tokens, times, sessions = _slot_time(records)
    if not len(tokens) or window_s <= 0:
        return None
    if load.mode != "closed":
        return Estimate(float(tokens.sum()) / window_s)
    return closed_throughput(tokens, times, load.concurrency or 1, groups_of(sessions), seed)


def _requests_per_s(records: Sequence[RequestRecord], load: Load, window_s: float) -> float | None:
    if not records or window_s <= 0:
        return None
    if load.mode != "closed":
        return len(records) / window_s
    _, times, _ = _slot_time(records)
    return (load.concurrency or 1) * len(times) / float(times.sum()) if len(times) else None


def _meets(record: RequestRecord, slo: Mapping[str, float]) -> bool:
    latencies = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2e": record.e2e_s}
    for name, limit in slo.items():
        value = latencies[name.split("_")[0]]
        if value is not None and value > limit:
            return False
    return True


def _batch_size(replay: Replay) -> dict[str, float | None]:
    running = [g.running for at, g in replay.gauges if g.running is not None and at <= replay.window_s[1]]
    counters = replay.counters
    if counters and counters.decode_steps and counters.engine_steps:
        mean: float | None = counters.decode_steps / counters.engine_steps
    else:
        mean = float(np.mean(running)) if running else None
    return {"mean": mean, "p95": float(np.quantile(running, 0.95)) if running else None}


def _prefix_hit_rate(replay: Replay) -> float | None:
    counters = replay.counters
    if counters is None or counters.prefix_hit_tokens is None or not counters.prefix_query_tokens:
        return None
    return counters.prefix_hit_tokens / counters.prefix_query_tokens


def _lags(records: Sequence[RequestRecord]) -> list[float]:
    return [r.sent_s - r.intended_s for r in records if r.sent_s is not None]


def _send_lag(records: Sequence[RequestRecord]) -> float | None:
    lags = _lags(records)
    return float(np.quantile(lags, 0.99)) if lags else None


def _sending_problem(replay: Replay, load: Load) -> str | None:
    """Why the client itself spoiled this measurement; None if it did not."""
    records = replay.records
    lags = _lags(records)
    quantile = 0.99 if len(lags) >= 100 else 0.9  # of few requests p99 is the single worst one, which one hiccup decides
    lag = float(np.quantile(lags, quantile)) if lags else None
    ttfts = [r.ttft_s for r in records if r.status == "completed" and r.ttft_s is not None]
    limit = max(replay.send_lag_limit_s, 0.1 * float(np.median(ttfts))) if ttfts else replay.send_lag_limit_s
    if lag is not None and lag > limit:
        return (
            f"the client sent late: p{quantile * 100:.0f} send lag {lag * 1e3:.1f} ms, limit {limit * 1e3:.1f} ms; "
            f"it used {replay.client_busy:.0%} of its core"
        )
    sent = sorted(r.sent_s for r in records if r.sent_s is not None)
    planned = sorted(r.intended_s for r in records)
    if load.mode == "trace" and len(sent) > 1 and planned[-1] - planned[0] >= 1.0:
        achieved = (len(sent) - 1) / (sent[-1] - sent[0]) / ((len(planned) - 1) / (planned[-1] - planned[0]))
        if achieved < 0.98:
            return f"the client reached {achieved:.1%} of the planned request rate; it needs 98 %"
    return None


def _token_warnings(records: Sequence[RequestRecord]) -> list[str]:
    done = [r for r in records if r.status == "completed"]
    unknown = sum(r.output_tokens is None for r in done)
    empty = sum(not r.chunk_s for r in done)
    differing = sum(
        bool(r.chunk_tokens)
        and r.output_tokens is not None
        and abs(sum(r.chunk_tokens) - r.output_tokens) > max(1, 0.02 * r.output_tokens)
        for r in done
    )
    warnings = []
    if unknown:
        warnings.append(f"{unknown} of {len(done)} responses did not say how many tokens they hold")
    if empty:
        warnings.append(f"{empty} of {len(done)} responses held no token: they have no TTFT")
    if differing:
        warnings.append(f"in {differing} of {len(done)} responses usage differs from the token ids by more than 2 %")
    return warnings
