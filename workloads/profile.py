"""What a trace holds, as plain data: what a person must know before any number measured on it."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workloads.types import Trace, percentiles

REFUSED_WITH_SPECULATION = ("min_p", "logit_bias", "min_tokens")
"""Parameters that engines refuse or ignore once they speculate (vLLM answers HTTP 400)."""

TEXT_BLOCK_CHARS = 256
"""Shared prefixes of text are counted in blocks of this many characters."""

PERCENTILES_OF = ("input_tokens", "output_tokens", "max_tokens", "source_latency_s")


@dataclass(frozen=True)
class Profile:
    """Numbers are None where the trace does not know. Shares are of the kept requests, 0 to 1."""

    summary: Mapping[str, Any]  # `Trace.summary`
    arrivals: Mapping[str, Any]
    lengths: Mapping[str, Mapping[str, float | None]]
    concurrency: Mapping[str, Any]
    prefix_sharing: Mapping[str, Any]
    sessions: Mapping[str, Any]
    requests: Mapping[str, Any]
    acceptance: Sequence[Mapping[str, Any]]  # offline acceptance, one entry a setting, category and context bucket
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def profile(
    trace: Trace,
    *,
    service_time_s: float | None = None,
    context_tokens: int | None = None,
    acceptance: Sequence[Mapping[str, Any]] = (),
) -> Profile:
    """The profile of `trace`.

    Args:
        service_time_s: mean time in the server, for the concurrency that the arrivals imply; None takes the recorded latencies.
        context_tokens: the model's context, to name requests that do not fit.
        acceptance: what `harness.offline` found on the recorded outputs, as plain data.
    """
    arrivals = _arrivals(trace)
    requests = _requests(trace)
    lengths = {name: percentiles(trace.numbers(name)) for name in PERCENTILES_OF if trace.known(name)}
    return Profile(
        summary=trace.summary(),
        arrivals=arrivals,
        lengths=lengths,
        concurrency=_concurrency(trace, service_time_s),
        prefix_sharing=_prefix_sharing(trace),
        sessions=_sessions(trace),
        requests=requests,
        acceptance=list(acceptance),
        warnings=tuple(_warnings(trace, arrivals, requests, context_tokens)),
    )


def _arrivals(trace: Trace) -> dict[str, Any]:
    """Rates per second; `dispersion` is the variance of the requests in each second over their mean (1 for a Poisson stream)."""
    times = np.sort(trace.arrivals_s[~np.isnan(trace.arrivals_s)])
    span = float(times[-1] - times[0]) if len(times) else 0.0
    if span <= 0:
        return {
            "span_s": span if len(times) else None,
            "mean_rps": None,
            "peak_rps": None,
            "dispersion": None,
            "quantum_s": None,
        }
    per_second = np.bincount((times - times[0]).astype(np.int64), minlength=math.ceil(span))
    distinct = np.unique(times)
    return {
        "span_s": span,
        "mean_rps": (len(times) - 1) / span,
        "peak_rps": float(per_second.max()),
        "dispersion": float(per_second.var() / per_second.mean()),
        "distinct_times": len(distinct),
        "quantum_s": _quantum(times, distinct),
    }


def _quantum(times: NDArray[np.float64], distinct: NDArray[np.float64]) -> float | None:
    """The grid that arrivals lie on: the usual gap between distinct times where each is shared by two requests or more on average
    and 80 % of the gaps are within 5 % of a multiple of it; None without one."""
    if len(distinct) < 3 or len(times) < 2 * len(distinct):
        return None
    gaps = np.diff(distinct)
    usual = float(np.median(gaps))
    multiples = gaps / usual
    near = np.abs(multiples - np.rint(multiples)) <= 0.05
    return usual if near.mean() >= 0.8 else None


def _concurrency(trace: Trace, service_time_s: float | None) -> dict[str, Any]:
    """Requests in the server at once if each stays for its service time: mean over the span (Little's law) and largest."""
    times = trace.arrivals_s
    recorded = trace.numbers("source_latency_s")
    stay = np.full(len(trace), service_time_s) if service_time_s is not None else recorded
    known = ~np.isnan(times) & ~np.isnan(stay.astype(np.float64))
    origin = "given" if service_time_s is not None else "recorded"
    if not known.any():
        return {"service_time_s": None, "service_time_from": None, "mean": None, "max": None}
    begin, end = times[known], times[known] + stay[known]
    moments = np.concatenate([begin, end])
    change = np.concatenate([np.ones(len(begin)), -np.ones(len(end))])
    order = np.lexsort((change, moments))  # who leaves makes room first
    span = float(end.max() - begin.min())
    return {
        "service_time_s": float(stay[known].mean()),
        "service_time_from": origin,
        "mean": float(stay[known].sum() / span) if span > 0 else None,
        "max": int(np.cumsum(change[order]).max()),
    }


def _prefix_sharing(trace: Trace) -> dict[str, Any]:
    """Share of the input that repeats the beginning of an earlier request: what a cache without limit would hold."""
    if trace.known("prefix_blocks"):
        rows: list[Sequence[Any]] = [blocks or () for blocks in trace.values("prefix_blocks")]
        unit = "blocks"
    elif trace.known("messages") or trace.known("prompt"):
        texts = [m or p or "" for m, p in zip(_texts(trace, "messages"), _texts(trace, "prompt"), strict=True)]
        rows, unit = [_text_blocks(text) for text in texts], f"{TEXT_BLOCK_CHARS} characters"
    else:
        return {"share": None, "requests": None, "counted_in": None}
    seen: set[tuple[int, Any]] = set()
    total = hits = sharing = 0
    for blocks in rows:
        leading = next((i for i, block in enumerate(blocks) if (i, block) not in seen), len(blocks))
        seen.update(enumerate(blocks))
        total += len(blocks)
        hits += leading
        sharing += leading > 0
    return {"share": hits / total if total else None, "requests": sharing / len(rows), "counted_in": unit}


def _texts(trace: Trace, name: str) -> list[str | None]:
    return trace.table[name].to_pylist() if trace.known(name) else [None] * len(trace)


def _text_blocks(text: str) -> list[bytes]:
    """A digest for each full block of the text that stands for everything up to its end."""
    running, found = hashlib.blake2b(digest_size=8), []
    for at in range(0, len(text) - TEXT_BLOCK_CHARS + 1, TEXT_BLOCK_CHARS):
        running.update(text[at : at + TEXT_BLOCK_CHARS].encode())
        found.append(running.digest())
    return found


def _sessions(trace: Trace) -> dict[str, Any]:
    uses = Counter(session for session in trace.values("session_id") if session is not None)
    turns = list(uses.values())
    return {
        "count": len(turns),
        "requests_per_session": sum(turns) / len(turns) if turns else None,
        "longest": max(turns, default=None),
        "tenants": len(set(trace.values("tenant")) - {None}),
    }


def _requests(trace: Trace) -> dict[str, Any]:
    n = len(trace)
    sampling = [given or {} for given in trace.values("sampling")]
    temperatures = [given.get("temperature") for given in sampling]
    return {
        "temperature": {name: count / n for name, count in sorted(Counter(map(_temperature_class, temperatures)).items())},
        "structured_output": trace.known("response_format") / n,
        "tools": trace.known("tools") / n,
        "images": trace.known("images") / n,
        "recorded_output": trace.known("output_text") / n,
        "refused_with_speculation": {
            name: count for name in REFUSED_WITH_SPECULATION if (count := sum(1 for given in sampling if given.get(name)))
        },
        "categories": {str(name): count / n for name, count in Counter(trace.values("category")).most_common(20) if name},
    }


def _temperature_class(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "not recorded"
    return "greedy" if value == 0 else "up to 0.5" if value <= 0.5 else "up to 1" if value <= 1 else "above 1"


def _warnings(trace: Trace, arrivals: Mapping[str, Any], requests: Mapping[str, Any], context_tokens: int | None) -> list[str]:
    found = []
    if trace.grade == "C":
        found.append(f"content grade C ({trace.grade_reason}): no acceptance measured on it is used for a verdict")
    if arrivals["quantum_s"]:
        found.append(
            f"arrivals lie on a grid of {arrivals['quantum_s']:.3g} s: each replay is a burst at every step, and p95 TTFT depends "
            f"on it; --jitter {arrivals['quantum_s']:.3g} spreads them"
        )
    for name, count in requests["refused_with_speculation"].items():
        found.append(f"{count} requests use {name}, which engines refuse or ignore with speculation")
    if context_tokens is not None:
        inputs, outputs = trace.numbers("input_tokens"), trace.numbers("output_tokens")
        too_long = int((inputs + np.nan_to_num(outputs) > context_tokens).sum())
        if too_long:
            found.append(f"{too_long} requests are longer than the model's context of {context_tokens} tokens")
    return found
