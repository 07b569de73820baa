"""The table of all trials: one row each, with what is shown and what it sorts by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reports.compare import measured, speedups
from reports.rundata import RunData
from reports.text import DASH, VARIANT_NAMES, config_label, factor, group_label, ms, number, percent, tau


@dataclass(frozen=True, slots=True)
class Column:
    key: str
    title: str
    numeric: bool = True
    hint: str = ""


@dataclass(frozen=True, slots=True)
class CellValue:
    """`text` and, smaller, `detail` (an interval) are shown; `sort` is the raw value, None last."""

    text: str
    detail: str = ""
    sort: float | str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    number: int
    state: str
    measured: bool
    reason: str | None
    trace: str
    group: str
    variant: str
    cells: tuple[CellValue, ...]


COLUMNS = (
    Column("trial", "Trial", numeric=False),
    Column("configuration", "Configuration", numeric=False),
    Column("load", "In flight", hint="requests in flight (closed loop); open: the trace's own arrivals"),
    Column("ttft_p50", "TTFT p50 ms"),
    Column("ttft_p95", "TTFT p95 ms"),
    Column("tpot_p50", "TPOT p50 ms"),
    Column("tpot_p95", "TPOT p95 ms"),
    Column("e2e_p50", "E2E p50 ms"),
    Column("e2e_p95", "E2E p95 ms"),
    Column("throughput", "Tokens/s", hint="output tokens per second over the measured window"),
    Column("speedup", "Speed-up", hint="E2E p50, off ÷ on, at the same load, engine and quantization, on the same requests"),
    Column("tau", "τ", hint="tokens per decode step"),
    Column("acceptance", "Accepted", hint="accepted ÷ proposed draft tokens"),
    Column("failures", "Failed", hint="requests that failed, of those sent"),
)


def rows(run: RunData) -> list[Row]:
    """All trials in the order in which they ran."""
    gains = speedups(run)
    several = len({t["load"]["trace"] for t in run.trials}) > 1
    return [_row(trial, gains.get(trial["number"]), show_trace=several) for trial in run.trials]


def _row(trial: Mapping[str, Any], gain: Any, *, show_trace: bool) -> Row:
    config, load = trial["config"], trial["load"]
    stage = trial.get("stage") or trial["role"]
    place = CellValue(*_load(load, show_trace), sort=load["concurrency"] or 0)
    cells = (
        CellValue(str(trial["number"]), stage, trial["number"]),
        CellValue(config_label(config), group_label(config), f"{config['variant']} {config['k']:03d} {group_label(config)}"),
        place,
        *_latencies(trial["metrics"]),
        _throughput(trial["metrics"]),
        CellValue(factor(gain.value), _span(gain.ci95, factor), gain.value) if gain else CellValue(DASH),
        *_speculation(trial["speculation"]),
        _failures(trial["metrics"]),
    )
    variant = VARIANT_NAMES.get(config["variant"], config["variant"])
    return Row(
        number=trial["number"],
        state=trial["state"],
        measured=measured(trial),
        reason=trial["reason"],
        trace=load["trace"],
        group=group_label(config),
        variant=variant,
        cells=cells,
    )


def _span(ci: Sequence[float] | None, show: Callable[[float], str] = number) -> str:
    """An interval in the width of a cell: 412–455."""
    return "" if ci is None else f"{show(ci[0])}–{show(ci[1])}"


def _load(load: Mapping[str, Any], show_trace: bool) -> tuple[str, str]:
    text = str(load["concurrency"]) if load["mode"] == "closed" else "open"
    return text, load["trace"] if show_trace else ""


def _latencies(metrics: Mapping[str, Any] | None) -> list[CellValue]:
    cells = []
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        summary = (metrics or {}).get(name) or {}
        for quantile in ("p50", "p95"):
            value = summary.get(quantile)
            cells.append(CellValue(ms(value), _span(summary.get(f"{quantile}_ci95"), ms), value))
    return cells


def _throughput(metrics: Mapping[str, Any] | None) -> CellValue:
    value = metrics["output_tokens_per_s"] if metrics else None
    return CellValue(number(value), _span((metrics or {}).get("throughput_ci95")), value)


def _speculation(speculation: Mapping[str, Any] | None) -> tuple[CellValue, CellValue]:
    if speculation is None:
        return CellValue(DASH), CellValue(DASH)
    emitted, rate = speculation["tau"], speculation["acceptance_rate"]
    detail = _span(speculation["tau_ci95"], tau) if emitted != 1 else ""
    return CellValue(tau(emitted), detail, emitted), CellValue(percent(rate), "", rate)


def _failures(metrics: Mapping[str, Any] | None) -> CellValue:
    if metrics is None:
        return CellValue(DASH)
    requests = metrics["requests"]
    kinds = ", ".join(f"{kind} {count}" for kind, count in requests["failures"].items())
    return CellValue(f"{requests['failed']:,} / {requests['sent']:,}", kinds, requests["failed"])


def csv_rows(run: RunData) -> tuple[Sequence[str], list[Sequence[Any]]]:
    """The trial table as raw data: seconds, shares, null where not measured."""
    names = [
        f"{m}_{q}{part}"
        for m in ("ttft", "tpot", "e2e")
        for q in ("p50", "p95")
        for part in ("_s", "_ci95_low_s", "_ci95_high_s")
    ]
    header = [
        "trial",
        "state",
        "stage",
        "engine",
        "variant",
        "k",
        "weight_quantization",
        "kv_cache_dtype",
        "trace",
        "load",
        "concurrency",
        *names,
    ]
    header += ["output_tokens_per_s", "speedup_e2e_p50", "tau", "acceptance_rate", "requests_sent", "requests_failed", "reason"]
    gains = speedups(run)
    table: list[Sequence[Any]] = []
    for trial in run.trials:
        config, load, metrics, spec = trial["config"], trial["load"], trial["metrics"] or {}, trial["speculation"] or {}
        values: list[Any] = []
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            summary = metrics.get(name) or {}
            for quantile in ("p50", "p95"):
                values += [summary.get(quantile), *(summary.get(f"{quantile}_ci95") or (None, None))]
        requests, gain = metrics.get("requests") or {}, gains.get(trial["number"])
        table.append(
            [
                *(trial["number"], trial["state"], trial.get("stage") or trial["role"], config["backend"], config["variant"]),
                *(config["k"], config.get("weight_quantization"), config.get("kv_cache_dtype")),
                *(load["trace"], load["mode"], load["concurrency"], *values),
                *(
                    metrics.get("output_tokens_per_s"),
                    gain.value if gain else None,
                    spec.get("tau"),
                    spec.get("acceptance_rate"),
                ),
                *(requests.get("sent"), requests.get("failed"), trial["reason"]),
            ]
        )
    return header, table
