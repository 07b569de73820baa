"""From the loads of one turn to a `Sample`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from harness.gate.metrics import key
from harness.gate.types import Sample
from harness.replay import Replay
from harness.statistics import smooth_quantile
from harness.types import Measurement, RequestRecord
from workloads.types import Request

AGREEMENT = 0.01
"""Chunks count as steps only where the acceptance they give is within 1 % of what the server counts."""


def sample_of(loads: Sequence[tuple[Replay, Measurement]], requests: Sequence[Request]) -> Sample:
    """One turn: each load gives its metrics under its own concurrency; failures and answers of all are put together."""
    values: dict[str, float] = {}
    failures: dict[str, int] = {}
    outputs: dict[int, str] = {}
    greedy = {request.index for request in requests if request.sampling.get("temperature") == 0}
    for replay, measurement in loads:
        concurrency = replay.load.concurrency or 0
        values |= {key(name, concurrency): value for name, value in _values(replay, measurement).items()}
        for kind, count in measurement.requests["failures"].items():
            failures[kind] = failures.get(kind, 0) + count
        if replay is loads[0][0]:  # each request once; the first load is the one with the smallest batch
            outputs = {r.index: d for r in replay.records if r.index in greedy and (d := _digest(r)) is not None}
    return Sample(
        values=values,
        requests=sum(measurement.requests["sent"] for _, measurement in loads),
        failed=sum(failures.values()),
        failures=failures,
        outputs=outputs,
    )


def _values(replay: Replay, measurement: Measurement) -> dict[str, float]:
    e2e, ttft, spec = measurement.e2e_s, measurement.ttft_s, measurement.speculation
    done = [r for r in replay.records if r.status == "completed"]
    tau, step_s = acceptance_and_step(replay, spec.tau)
    found = {
        "tau": tau,
        **{f"position_{i + 1}": rate for i, rate in enumerate(spec.position_rates)},
        "step": step_s,
        "e2e_p50": _median([r.e2e_s for r in done]),
        "tpot_p50": _median([r.tpot_s for r in done]),
        "ttft_p50": _median([r.ttft_s for r in done]),
        "e2e_p95": e2e.p95 if e2e else None,
        "ttft_p95": ttft.p95 if ttft else None,
        "throughput": measurement.output_tokens_per_s,
        "goodput": measurement.goodput_rps,
        "batch": measurement.batch_size.get("mean"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _median(values: Sequence[float | None]) -> float | None:
    """The median of a turn, steadied: of eight requests the plain one jumps by a tenth when two of them swap places."""
    known = np.array([value for value in values if value is not None])
    return float(smooth_quantile(known, 0.5)) if len(known) else None


def acceptance_and_step(replay: Replay, counted_tau: float | None) -> tuple[float | None, float | None]:
    """tau and the mean time of a decode step as a sequence sees it, both over the measured requests.

    The server's counters hold the lead-in and lead-out too, whose prompts are new in every load and whose acceptance is noise
    here. Where a chunk is a step, the measured requests' own chunks give tau without them; where chunks do not agree with the
    counters (a server that joins steps), the counters are taken.
    """
    done = [r for r in replay.records if r.status == "completed" and r.output_tokens and r.output_tokens > 1]
    decode_s = sum((r.last_token_s or 0.0) - (r.first_token_s or 0.0) for r in done)
    tokens = sum(r.output_tokens - 1 for r in done if r.output_tokens)
    if not done or counted_tau is None:
        return counted_tau, None
    everything = _tokens_per_chunk([*replay.records, *replay.lead])
    own = _tokens_per_chunk(done)
    agrees = everything is not None and abs(everything / counted_tau - 1) <= AGREEMENT
    tau = own if own is not None and agrees else counted_tau
    return tau, decode_s * tau / tokens


def _tokens_per_chunk(records: Sequence[RequestRecord]) -> float | None:
    """Tokens after the first chunk ÷ chunks after the first, pooled; None where a chunk's tokens are not known."""
    done = [r for r in records if r.status == "completed"]
    if any(len(r.chunk_tokens) != len(r.chunk_s) for r in done):
        return None
    chunks = sum(len(r.chunk_tokens) - 1 for r in done if r.chunk_tokens)
    tokens = sum(sum(r.chunk_tokens[1:]) for r in done)
    return tokens / chunks if chunks else None


def _digest(record: RequestRecord) -> str | None:
    if record.status != "completed":
        return None
    answer = record.text if record.token_ids is None else ",".join(map(str, record.token_ids))
    return None if answer is None else hashlib.blake2b(answer.encode(), digest_size=8).hexdigest()
