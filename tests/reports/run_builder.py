"""A finished run directory as the main job leaves it, from a small model of an engine: the same seed gives the same files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import run_sections as sections
from run_sections import HOSTILE

ACCEPTANCE = {"off": (0.0, 0.0), "ngram": (0.55, 0.02), "draft_model": (0.82, 0.12), "eagle3": (0.78, 0.07)}
"""Variant -> (conditional acceptance of a draft token, cost of drafting one token relative to a step)."""


@dataclass(frozen=True)
class RunSpec:
    """What the run covered. `requests` is what confirmation sends; search sends a third of it."""

    seed: int = 0
    engines: Sequence[str] = ("reference",)
    traces: Sequence[str] = ("prod.jsonl",)
    variants: Sequence[str] = ("ngram", "draft_model")
    k: Sequence[int] = (1, 3, 5)
    batch_sizes: Sequence[int] = (1, 4, 16, 32)
    quantization: Sequence[str] = ("none",)
    requests: int = 90
    chunks: bool = True
    verdict: str | None = None  # None: what the model of the engine gives
    all_fail: bool = False
    extras: bool = True  # the optional sections
    search_requests: int | None = None


@dataclass
class BuiltRun:
    result: dict[str, Any]
    tables: dict[int, pa.Table] = field(default_factory=dict)


def build_run(folder: Path, spec: RunSpec = RunSpec()) -> Path:
    """Write result.json, config.yaml and the trials' records under `folder`."""
    built = result_of(spec)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(built.result, indent=1), encoding="utf-8")
    (folder / "config.yaml").write_text(
        "traces: [prod.jsonl]\nseed: 0\nstorage: postgresql://tuner:hunter2@db/optuna\n", encoding="utf-8"
    )
    for number, table in built.tables.items():
        trial = folder / "trials" / f"{number:04d}"
        trial.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, trial / "requests.parquet")
    return folder


def result_of(spec: RunSpec) -> BuiltRun:
    """The content of result.json and the records of every measured trial."""
    built = BuiltRun(result={})
    trials: list[dict[str, Any]] = []
    search = spec.search_requests or max(spec.requests // 3, 4)

    def add(config: dict[str, Any], trace: str, batch: int | None, stage: str, count: int) -> dict[str, Any]:
        trial, table = _trial(len(trials), config, trace, batch, stage=stage, count=count, spec=spec)
        if table is not None:
            built.tables[trial["number"]] = table
        trials.append(trial)
        return trial

    best: dict[tuple[str, str, str], dict[str, Any]] = {}
    for engine in spec.engines:
        for quant in spec.quantization:
            for trace in spec.traces:
                off = _config(engine, "off", 0, quant)
                for batch in spec.batch_sizes:
                    add(off, trace, batch, "baseline", search)
                add(off, trace, None, "baseline", spec.requests)
                for variant in spec.variants:
                    for k in spec.k:
                        for batch in spec.batch_sizes:
                            add(_config(engine, variant, k, quant), trace, batch, "search", search)
                chosen = _config(engine, spec.variants[-1], spec.k[len(spec.k) // 2], quant)
                for config in (chosen, off):
                    for batch in spec.batch_sizes:
                        add(config, trace, batch, "confirm", spec.requests)
                add(chosen, trace, None, "confirm", spec.requests)
                best[engine, quant, trace] = chosen
    _spoil(trials, built, spec)
    built.result = {
        "schema": 1,
        "workloads": [sections.workload(trace) for trace in spec.traces],
        "environment": sections.environment(),
        "trials": trials,
        "predictions": sections.predictions(trials) if spec.extras else [],
        "decisions": [_decision(trace, best, trials, spec) for trace in spec.traces],
        "preflight": sections.preflight() if spec.extras else [],
        "losslessness": sections.losslessness(spec.traces[0], _first_config(spec)) if spec.extras else [],
        "diagnosis": sections.diagnosis(spec.traces[0], _first_config(spec)) if spec.extras else [],
        "acceptance": sections.acceptance(spec.traces[0], _first_config(spec)) if spec.extras else [],
        "funnel": sections.funnel(spec.traces[0], _first_config(spec)) if spec.extras else [],
        "interference": sections.interference(_first_config(spec)) if spec.extras else None,
        "capacity": sections.capacity(spec.traces[0], _first_config(spec)) if spec.extras else [],
        "selftest": sections.selftest() if spec.extras else None,
        "search_cost": {
            "measured_s": sum(t["cost"]["seconds"] for t in trials),
            "server_starts": 9,
            "full_grid_estimated_s": 3 * sum(t["cost"]["seconds"] for t in trials),
            "stages": {
                stage: {
                    "seconds": sum(t["cost"]["seconds"] for t in trials if t["stage"] == stage),
                    "gpu_seconds": 0.0,
                    "loads": sum(t["stage"] == stage for t in trials),
                }
                for stage in ("baseline", "search", "confirm")
            },
        },
        "reproduce": {
            "command": "python tune.py --trace prod.jsonl --variants off,ngram,draft_model --seed 0",
            "seed": spec.seed,
        },
    }
    return built


def _first_config(spec: RunSpec) -> dict[str, Any]:
    return _config(spec.engines[0], spec.variants[-1], spec.k[0], "none")


def _config(engine: str, variant: str, k: int, quant: str) -> dict[str, Any]:
    return {
        "backend": engine,
        "model": "SmolLM2-135M-Instruct",
        "variant": variant,
        "k": k,
        "topk": 1,
        "num_draft_tokens": None,
        "draft": "self-int4" if variant == "draft_model" else None,
        "draft_quantization": "none",
        "weight_quantization": quant,
        "kv_cache_dtype": "auto",
        "tensor_parallel": 1,
        "max_num_seqs": 64,
        "chunked_prefill": True,
        "prefix_caching": True,
        "extra": {},
    }


def _position_rates(variant: str, k: int) -> list[float]:
    rate, _ = ACCEPTANCE[variant]
    return [round(rate**i * 0.97 ** (i * (i - 1) / 2), 4) for i in range(1, k + 1)]


def _trial(
    number: int, config: dict[str, Any], trace: str, batch: int | None, *, stage: str, count: int, spec: RunSpec
) -> tuple[dict[str, Any], pa.Table | None]:
    key = f"{spec.seed}/{config}/{trace}/{batch}/{stage}"
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little"))
    lengths = np.random.default_rng(spec.seed + len(trace)).integers(12, 90, size=spec.requests)[:count]
    width = batch or 3
    variant, k = config["variant"], config["k"]
    _, draft_cost = ACCEPTANCE[variant]
    rates = _position_rates(variant, k)
    tau = 1 + sum(rates)
    memory_s, compute_s = 0.030 * (1 + draft_cost * k), 0.0022 * width * (1 + 1.1 * k)
    speed = {"none": 1.0, "int8": 0.7, "int4": 0.6}[config["weight_quantization"]] * (
        0.6 if config["backend"] == "vllm" else 1.0
    )
    step_s = (memory_s + compute_s) * speed
    tpot = step_s / tau * rng.lognormal(0, 0.08, size=count)
    ttft = 0.05 + 0.01 * width * rng.lognormal(0, 0.5, size=count)
    e2e = ttft + tpot * (lengths - 1)
    intended = np.zeros(count) if batch else np.sort(rng.uniform(0, 60, size=count))
    failed = rng.random(count) < (0.02 if stage == "search" else 0.0)
    tokens_per_s = float(width * lengths.mean() / e2e.mean())
    measured = ~failed
    metrics = {
        "requests": {
            "sent": count,
            "completed": int(measured.sum()),
            "failed": int(failed.sum()),
            "failures": {"timeout": int(failed.sum())} if failed.any() else {},
        },
        "ttft_s": _summary(ttft[measured]),
        "tpot_s": _summary(tpot[measured]),
        "chunk_gap_s": _summary(tpot[measured] * tau),
        "e2e_s": _summary(e2e[measured]),
        "output_tokens_per_s": tokens_per_s,
        "throughput_ci95": [tokens_per_s * 0.96, tokens_per_s * 1.04] if count >= 20 else None,
        "requests_per_s": float(width / e2e.mean()),
        "goodput_rps": None,
        "batch_size": {"mean": width * 0.93, "p95": float(width)},
        "prefix_hit_rate": None,
        "preemptions": 0,
        "send_lag_s": {"p99": 0.0008},
    }
    steps = int(lengths.sum() / tau)
    speculation = {
        "tau": tau,
        "tau_ci95": [tau * 0.97, tau * 1.03] if variant != "off" else [1.0, 1.0],
        "tau_drafted": 1 + sum(rates) if k else None,
        "tau_counter": tau,
        "acceptance_rate": sum(rates) / k if k else None,
        "position_rates": rates,
        "verify_steps": steps,
        "drafted_steps": steps if k else 0,
        "draft_tokens": steps * k,
        "accepted_tokens": int(steps * sum(rates)),
    }
    trial = {
        "number": number,
        "state": "COMPLETE",
        "role": stage,
        "stage": stage,
        "reason": None,
        "config": config,
        "load": {
            "mode": "closed" if batch else "trace",
            "time_scale": None if batch else 1.0,
            "concurrency": batch,
            "trace": trace,
        },
        "metrics": metrics,
        "speculation": speculation,
        "engine": {"version": "0.1.0", "startup_s": 4.2, "kv_cache_tokens": 65536, "resolved": {"dtype": "bfloat16"}},
        "quality": {"greedy_agreement": None if config["weight_quantization"] == "none" else 0.97, "mean_kl": None},
        "cost": {"seconds": 6.0 + count * 0.1, "gpu_seconds": 0.0},
        "warnings": [],
    }
    columns = {"lengths": lengths, "ttft": ttft, "tpot": tpot, "e2e": e2e, "intended": intended, "failed": failed}
    return trial, _records(columns, tau, chunks=spec.chunks)


def _summary(values: np.ndarray) -> dict[str, Any]:
    n = len(values)
    half = 1.96 * np.sqrt(n * 0.25)
    ordered = np.sort(values)
    p50 = [float(ordered[max(int(n / 2 - half), 0)]), float(ordered[min(int(n / 2 + half), n - 1)])] if n >= 8 else None
    p95 = [float(np.percentile(values, 90)), float(ordered[-1])] if n >= 60 else None
    return {
        "p50": float(np.percentile(values, 50)),
        "p95": float(np.percentile(values, 95)),
        "p99": float(np.percentile(values, 99)),
        "mean": float(values.mean()),
        "p50_ci95": p50,
        "p95_ci95": p95,
    }


def _records(columns: Mapping[str, np.ndarray], tau: float, *, chunks: bool) -> pa.Table:
    n = len(columns["lengths"])
    failed = columns["failed"]

    def known(name: str) -> pa.Array:
        return pa.array(columns[name], mask=failed)

    first = columns["intended"] + columns["ttft"]
    last = columns["intended"] + columns["e2e"]
    sizes = [max(int(length / tau), 1) if chunks else 0 for length in columns["lengths"]]
    gaps = [list(np.linspace(a, b, size)) for a, b, size in zip(first, last, sizes, strict=True)]
    return pa.table(
        {
            "index": pa.array(range(n), pa.int64()),
            "status": ["failed" if bad else "completed" for bad in failed],
            "failure": ["timeout" if bad else None for bad in failed],
            "intended_s": columns["intended"],
            "sent_s": columns["intended"] + 0.0004,
            "first_token_s": pa.array(first, mask=failed),
            "last_token_s": pa.array(last, mask=failed),
            "ttft_s": known("ttft"),
            "tpot_s": known("tpot"),
            "e2e_s": known("e2e"),
            "input_tokens": pa.array(columns["lengths"] * 3),
            "output_tokens": pa.array(columns["lengths"], mask=failed),
            "tokens_source": ["usage"] * n,
            "finish_reason": [None if bad else "length" for bad in failed],
            "chunk_s": pa.array(gaps, pa.list_(pa.float64())),
            "chunk_tokens": pa.array([[2] * size for size in sizes], pa.list_(pa.int64())),
            "category": ["chat"] * n,
            "session": pa.nulls(n, pa.string()),
        }
    )


def _spoil(trials: list[dict[str, Any]], built: BuiltRun, spec: RunSpec) -> None:
    """Trials that failed, were refused or stopped early; a trial with failures; one without intervals."""

    def lose(trial: dict[str, Any], state: str, reason: str) -> None:
        trial.update(state=state, reason=reason, metrics=None, speculation=None, engine=None)
        built.tables.pop(trial["number"], None)

    if spec.all_fail:
        for trial in trials:
            lose(trial, "FAIL", "out_of_memory: the KV cache does not fit; lower --max-num-seqs")
        return
    searched = [t for t in trials if t["stage"] == "search"]
    if len(searched) < 8:
        return
    lose(searched[3], "FAIL", f"the engine died during the load; see server.log ({HOSTILE})")
    lose(searched[7], "INFEASIBLE", "K = 5 needs 66 positions beyond the context of 2048; lower --k")
    pruned = searched[6]
    pruned.update(state="PRUNED", reason="E2E p50 far above the best so far after 12 requests")
    for name in ("ttft_s", "tpot_s", "chunk_gap_s", "e2e_s"):
        pruned["metrics"][name].update(p50_ci95=None, p95_ci95=None)
    pruned["metrics"]["output_tokens_per_s"] = None


def _decision(
    trace: str, best: Mapping[tuple[str, str, str], dict[str, Any]], trials: Sequence[Mapping[str, Any]], spec: RunSpec
) -> dict[str, Any]:
    config = best[spec.engines[0], spec.quantization[0], trace]
    verdict = spec.verdict or ("not_measurable" if spec.all_fail else "enable_below_batch")
    on = verdict in ("enable", "enable_below_batch")
    measured = _open_loop_ratio(trace, config, trials) if on else 1.0
    speedup = {
        "enable": {"metric": "e2e_p50", "value": measured, "ci95": [measured * 0.94, measured * 1.06]},
        "enable_below_batch": {"metric": "e2e_p50", "value": measured, "ci95": [measured * 0.94, measured * 1.06]},
        "skip": {"metric": "e2e_p50", "value": 0.83, "ci95": [0.79, 0.88]},
        "no_clear_winner": {"metric": "e2e_p50", "value": 1.02, "ci95": [0.97, 1.08]},
        "not_measurable": None,
    }[verdict]
    last = max(spec.batch_sizes)
    schedule = [[1, 4, config["k"]], [5, 16, 1], [17, last, 0]] if on and last > 16 else []
    reasons = {
        "not_measurable": ["no speculative configuration could be measured against a baseline; see the failed trials"],
        "skip": ["E2E p50 with draft_model K=3 against off: 0.83x (95 % interval 0.79 to 0.88), at the trace's own load."],
    }.get(
        verdict,
        [
            f"E2E p50 with {config['variant']} K={config['k']} against off, at the trace's own load.",
            "Acceptance length tau is 2.98 tokens per step; a step costs 1.75x one without it, so a token costs 0.59x.",
            "Throughput in closed loop over the trace's batch sizes, on against off: 1.12x (95 % interval 1.05 to 1.20).",
            "E2E p95: not tested (too few requests).",
        ],
    )
    below = verdict == "enable_below_batch"
    off = None if verdict == "not_measurable" else {**config, "variant": "off", "k": 0, "draft": None}
    drift = "The machine drifted: off was 4 % slower at the end than at the start of the run (reference)."
    judgement = {
        "trace": trace,
        "verdict": verdict,
        "config": config if on else off,
        "below_batch": 17 if below else None,
        "break_even_batch": {"value": 17.2, "ci95": [14.8, 20.1]} if below else {"value": None, "ci95": None},
        "k_by_batch_size": schedule,
        "speedup": speedup,
        "reasons": reasons,
        "warnings": [drift] if on else [],
    }
    by_engine = []
    if verdict != "not_measurable":
        for (engine, quant, name), found in best.items():
            if name == trace:
                group = engine if quant == "none" else f"{engine}, {quant} weights"
                by_engine.append({**judgement, "group": group, "config": found})
    launch = None
    if judgement["config"]:
        command = "python -m backends.reference --model SmolLM2-135M-Instruct --port 8000"
        command += f" --variant {config['variant']} --k {config['k']} --draft self-int4 --max-num-seqs 64" if on else ""
        plain = {"command": command, "env": {"OMP_NUM_THREADS": "2"}, "files": {}}
        texts = {"dockerfile": "FROM ENGINE_IMAGE\n", "kubernetes": "containers: []\n"}
        scheduled = {**plain, "command": f"{command} --k-schedule 1-16", "files": {"k.json": "{}"}} if below else None
        launch = {**plain, **texts, "scheduled": scheduled}
    return {**judgement, "by_engine": by_engine, "launch": launch, "depth": sections.depth() if spec.extras else None}


def _open_loop_ratio(trace: str, config: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> float:
    mine = [t for t in trials if t["load"]["mode"] == "trace" and t["load"]["trace"] == trace and t["metrics"]]
    off = next(t for t in mine if t["config"]["variant"] == "off" and t["config"]["backend"] == config["backend"])
    on = next(t for t in mine if t["config"] == config)
    return off["metrics"]["e2e_s"]["p50"] / on["metrics"]["e2e_s"]["p50"]
