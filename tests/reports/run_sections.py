"""The parts of a built run that no trial stands behind: workload, machine, predictions, and the optional sections."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

HOSTILE = "<script>window.pwned=1</script></svg>{{7*7}}{%raw%}\x1b[31m\x00\u202egnp.exe שלום $x_1$ 'q' \"q\" & -->"
"""Markup, template syntax, control characters, a right-to-left override, Hebrew and mathtext in one name."""

SECRET = "SECRET PROMPT TEXT"
"""Stands for the text of a prompt: it must not reach a report unless asked for."""


def workload(trace: str) -> dict[str, Any]:
    return {
        "trace": trace,
        "sha256": hashlib.sha256(trace.encode()).hexdigest(),
        "format": "openai_batch",
        "read": 120,
        "kept": 117,
        "dropped": {"embeddings_url": 2, f"{HOSTILE} not JSON": 1},
        "content_grade": "B",
        "span_s": 60.0,
        "input_tokens": {"p50": 152.0, "p95": 260.0},
        "output_tokens": {"p50": 51.0, "p95": 86.0},
        "notes": [f"output tokens are counts of the engine {HOSTILE}"],
    }


def environment() -> dict[str, Any]:
    return {
        "host": {"cpu": "AMD EPYC (2 cores)", "cores": 2, "memory_gib": 24, "system": "Linux"},
        "gpu": [],
        "versions": {"python": "3.12.3", "torch": "2.13.0", "transformers": "5.24.0", "spectune": "0.1.0"},
        "fingerprint": "sha256:" + "ab12" * 16,
    }


def predictions(trials: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    searched = [t for t in trials if t["stage"] == "search" and t["metrics"]][:6]
    return [
        {
            "config": t["config"],
            "load": t["load"],
            "tau": t["speculation"]["tau"] * 1.04,
            "e2e_p50_s": t["metrics"]["e2e_s"]["p50"] * 0.93,
            "output_tokens_per_s": 80.0,
            "measured_in_trial": t["number"] if i % 2 == 0 else None,
        }
        for i, t in enumerate(searched)
    ]


def preflight() -> list[dict[str, Any]]:
    return [
        {"check": "tokenizer", "status": "ok", "message": "draft and target share one vocabulary of 49152 tokens"},
        {
            "check": "context",
            "status": "warn",
            "message": f"2 prompts are within 64 tokens of the context {HOSTILE}",
            "text": SECRET,
        },
    ]


def losslessness(trace: str, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "trace": trace,
            "config": config,
            "verdict": "within_control",
            "reason": "2 of 40 answers differ from off's, 3 of 40 in the control: no more than another batch shape does (p = 0.69)",
            "requests": 40,
            "exact_match_share": 0.95,
            "exact_match_ci95": [0.84, 0.99],
            "control": "off at 1 at a time against off at 4 at a time",
            "control_exact_match_share": 0.925,
            "control_exact_match_ci95": [0.8, 0.97],
            "first_divergence_token_p50": 23,
            "divergence_tokens": [16, 30],
            "near_tie_divergences": 2,
            "gaps_known": True,
            "degenerate": {"empty": 0, "looping": 0, "not text": 0},
            "sampled": {
                "requests": 12,
                "token_frequency_p": 0.41,
                "length_p": 0.7,
                "mean_tokens_on": 30.1,
                "mean_tokens_off": 29.8,
            },
            "examples": [{"text": SECRET, "output_text": SECRET}],
        }
    ]


def diagnosis(trace: str, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    causes = [
        {
            "cause": "workload mismatch",
            "certainty": "likely",
            "evidence": f"ordinary text is accepted at 0.71, the trace's prompts at 0.41 {HOSTILE}",
            "next": "train a head on this workload, or try n-gram or suffix drafting",
        },
        {"cause": "long context", "certainty": "possible", "evidence": "not separated", "next": "measure longer prompts"},
    ]
    return [{"trace": trace, "config": config, "first_position_acceptance": 0.41, "causes": causes}]


def depth() -> dict[str, Any]:
    return {
        "mean_batch": 3.1,
        "drift": 1.01,
        "overhead": {
            "regime": "between",
            "step_time_elasticity": 0.5,
            "step_cost_ratio": 1.75,
            "draft_and_verify_share": 0.4286,
            "kv_cache_tokens_off": 65536,
            "kv_cache_tokens_on": 58982,
            "concurrency_ceiling_off": 322.8,
            "concurrency_ceiling_on": 290.6,
            "startup_off_s": 4.2,
            "startup_on_s": None,
        },
        "rules_of_thumb": [
            {"rule": "It pays where the average batch size is under 16 to 32.", "here": "3.1", "says": "on", "agrees": True},
            {"rule": "It pays for targets of 30 billion parameters or more.", "here": HOSTILE, "says": "off", "agrees": False},
            {"rule": "It pays where memory is not already the limit.", "here": "not known", "says": None, "agrees": None},
        ],
        "sensitivity": [
            {
                "change": "load +50 %",
                "speedup": 0.94,
                "ci95": [0.9, 0.99],
                "outcome": "off",
                "changes_verdict": True,
                "predicted": True,
                "note": "batch size about 24.0",
            },
            {
                "change": "load -50 %",
                "speedup": None,
                "ci95": None,
                "outcome": None,
                "changes_verdict": None,
                "predicted": True,
                "note": "beyond the measured batch sizes",
            },
        ],
    }


def acceptance(trace: str, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    def group(name: str, tau: float) -> dict[str, Any]:
        counts = {"requests": 20, "steps": 400, "tokens": int(400 * tau), "first_accepted": 200}
        return {"group": name, **counts, "tau": tau, "tau_ci95": None, "first_position_rate": 0.5}

    load = {"mode": "trace", "trace": trace, "concurrency": None, "time_scale": 1.0}
    groups = {"by_category": [group("chat", 1.2), group(HOSTILE, 2.5)], "by_context": [group("0 to 511 tokens", 1.9)]}
    whole = {"trace": trace, "config": config, "load": load, **groups, "by_time": [group("1 of 4", 1.9)] * 2, "missing": None}
    none = {"by_category": [], "by_context": [], "by_time": [], "missing": "the server merges steps into chunks"}
    return [whole, {"trace": trace, "config": config, "load": load, **none}]


def capacity(trace: str, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    def side(name: str, rps: float, replicas: int) -> dict[str, Any]:
        row = {"p95_minute_rps": 2.2, "peak_minute_rps": 2.6, "replicas_p95": replicas, "replicas_peak": replicas}
        fleet = [{"time_scale": s, **row, "headroom": 0.25, "usd_per_hour": 2.5 * replicas} for s in (0.5, 1.0, 2.0)]
        return {
            "side": name,
            "config": config if name == "on" else {**config, "variant": "off", "k": 0, "draft": None},
            "passing_rps": rps,
            "passing_concurrency": 4,
            "passing_tokens_per_s": rps * 50,
            "failing_rps": rps * 1.2,
            "failing_concurrency": 16,
            "limited_by": "tpot_p95",
            "between_rps": rps * 1.1,
            "predicted_rps": rps * 1.1,
            "open_loop": {
                "passing": {"requests_per_s": rps * 0.97, "broken": [], "trial": 7},
                "failing": {"requests_per_s": rps * 1.08, "broken": ["tpot_p95"], "trial": 8} if name == "off" else None,
                "replays": [],
            },
            "sized_by": "open loop",
            "saturated": False,
            "usd_per_million_output_tokens": 2.5 / 3600 / (rps * 50) * 1e6,
            "own_load": {"requests_per_s": 1.9, "meets_slo": name == "on", "broken": [] if name == "on" else ["tpot_p95"]},
            "fleet": fleet,
        }

    asked = {"mean_rps": 1.95, "p95_minute_rps": 2.2, "peak_minute_rps": 2.6, "minutes": 10.0}
    sides = [side("off", 1.5, 2), side("on", 3.0, 1)]
    return [{"trace": trace, "slo": {"tpot_p95": 0.04}, "gpu_hourly_usd": 2.5, "demand": asked, "sides": sides}]


def interference(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "config": config,
            "decoders": 4,
            "long_prompts": 2,
            "long_prompt_tokens": 2000.0,
            "tpot_before_s": 0.030,
            "tpot_during_s": None,
            "tpot_after_s": 0.031,
            "largest_gap_before_s": 0.033,
            "largest_gap_during_s": 1.2,
            "pace_during_share": 0.0,
            "long_ttft_s": 1.15,
            "order": "prefill first",
        }
    ]


def funnel(trace: str, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    tau = [{"k": 1, "value": 1.8, "ci95": [1.7, 1.9]}, {"k": 3, "value": 2.9, "ci95": None}]
    steps = [{"batch_size": b, "step_s": 0.03 + 0.002 * b, "memory_share": 0.9 - 0.01 * b} for b in (1, 16)]
    best = [{"batch_size": b, "config": config, "speedup": 1.4 - 0.02 * b, "sd": 0.05} for b in (1, 16)]
    return [
        {
            "group": "reference",
            "step_cost": {"error": 0.04, "loads": 9, "crossover_batch": 6.5, "by_batch": steps},
            "acceptance": [
                {"trace": trace, "config": config, "tau": tau, "position_rates": [0.8], "gap": 0.03},
                {"trace": HOSTILE, "config": config, "tau": [], "position_rates": [], "gap": None},
            ],
            "pruned": [{"config": config, "reason": f"predicted slower than off {HOSTILE}"}],
            "schedule": [{"trace": trace, "by_batch": best, "break_even_batch": {"value": 17.0, "ci95": None}}],
            "confirmation": {
                "rounds": 2,
                "clear": False,
                "winner": config,
                "speedups": [{"config": config, "value": 1.2, "ci95": [1.1, 1.3]}],
            },
        },
        {"group": HOSTILE, "step_cost": None, "acceptance": [], "pruned": [], "schedule": [], "confirmation": None},
    ]


def selftest() -> dict[str, Any]:
    check = {"name": "TTFT p50, closed loop", "measured": "20.1 ms", "true": "20.0 ms", "limit": "1 ms", "passed": True}
    checks = [check, {**check, "name": f"a stall {HOSTILE}", "limit": None, "passed": False}]
    return {"date": "2026-01-02", "checks": checks}
