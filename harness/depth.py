"""What stands behind a verdict, gathered from the findings: overhead, rules of thumb, and what would change it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from backends.checkpoint import read
from backends.drafts import known_drafts
from backends.types import ConfigError, ServingConfig
from harness.decide import Evidence, Judgement
from harness.findings import Findings, closed_load, open_load
from harness.overhead import Overhead, overhead
from harness.rules_of_thumb import Deployment, Side, grounded_share, rules_of_thumb
from harness.sensitivity import acceptance_what_ifs, load_what_ifs
from harness.store import Trial
from workloads.types import Request, Trace


def depth(findings: Findings, trace: Trace, evidence: Evidence, judgement: Judgement) -> dict[str, Any]:
    """The `depth` object of a decision in `result.json`."""
    found = overhead_of(findings, trace.name, evidence)
    rules = rules_of_thumb(_deployment(findings, trace, evidence), measured_side(evidence, judgement))
    return {
        "mean_batch": evidence.mean_batch,
        "drift": evidence.drift,
        "overhead": found.to_dict() if found else None,
        "rules_of_thumb": [rule.to_dict() for rule in rules],
        "sensitivity": _sensitivity(findings, trace.name, evidence, judgement),
    }


def measured_side(evidence: Evidence, judgement: Judgement) -> Side | None:
    """Which side the measurement is on at the trace's own batch size; None where it found no winner."""
    if judgement.verdict == "enable":
        return "on"
    if judgement.verdict == "skip":
        return "off"
    deciding = evidence.deciding()
    if judgement.verdict == "enable_below_batch" and judgement.below_batch and deciding:
        return "on" if deciding.batch_size < judgement.below_batch else "off"
    return None


def overhead_of(findings: Findings, trace: str, evidence: Evidence) -> Overhead | None:
    deciding = evidence.deciding()
    if deciding is None:
        return None
    off, on = (_trial_at(findings, trace, config, deciding.batch_size) for config in (evidence.config.off(), evidence.config))
    return overhead(
        [(row.batch_size, row.tpot_off_s) for row in evidence.by_batch if row.tpot_off_s],
        evidence.mean_batch or deciding.batch_size,
        deciding.step_cost_ratio,
        kv_cache_tokens=(_engine(off, "kv_cache_tokens"), _engine(on, "kv_cache_tokens")),
        mean_request_tokens=_mean_request_tokens(findings, off),
        startup_s=(_engine(off, "startup_s"), _engine(on, "startup_s")),
    )


def _deployment(findings: Findings, trace: Trace, evidence: Evidence) -> Deployment:
    config = evidence.config
    replay = findings.find(config.off(), open_load(trace.name, findings.settings), "baseline")
    return Deployment(
        mean_batch=evidence.mean_batch,
        objective=findings.objectives[0],
        parameters=_parameters(config.model),
        published_heads=len(known_drafts(config.model)),
        peak_kv_share=_peak_kv_share(findings, trace.name, replay),
        preemptions=replay.metrics["preemptions"] if replay and replay.metrics else None,
        grounded_share=grounded_share([(_prompt(r), r.output_text) for r in trace.requests() if r.output_text]),
        draft_free=config.variant in ("ngram", "suffix"),
    )


def _sensitivity(findings: Findings, trace: str, evidence: Evidence, judgement: Judgement) -> list[dict[str, Any]]:
    deciding = evidence.deciding()
    if deciding is None or judgement.speedup is None or not math.isfinite(judgement.speedup.value):
        return []
    rows = []
    on = _trial_at(findings, trace, evidence.config, deciding.batch_size)
    spec = on.speculation if on else None
    if on and on.metrics and spec and spec["position_rates"] and spec["verify_steps"]:
        decode_share = 1 - on.metrics["ttft_s"]["mean"] / on.metrics["e2e_s"]["mean"]
        share = (spec["drafted_steps"] or spec["verify_steps"]) / spec["verify_steps"]
        rows += acceptance_what_ifs(judgement.speedup, spec["position_rates"], share, decode_share)
    if evidence.mean_batch is not None:
        rows += load_what_ifs(judgement.speedup, evidence.by_batch, evidence.mean_batch)
    return [row.to_dict() for row in rows]


def _trial_at(findings: Findings, trace: str, config: ServingConfig, batch: int) -> Trial | None:
    load = closed_load(trace, batch)
    stages = ("confirm", "baseline" if config.variant == "off" else "search")
    return next((trial for stage in stages if (trial := findings.find(config, load, stage))), None)


def _engine(trial: Trial | None, name: str) -> Any:
    return (trial.engine or {}).get(name) if trial else None


def _tokens(findings: Findings, trial: Trial) -> np.ndarray[Any, Any]:
    """[requests] prompt and output tokens of what completed."""
    records = findings.records_of(trial)
    sizes = [records[name].to_numpy(zero_copy_only=False).astype(float) for name in ("input_tokens", "output_tokens")]
    total = sizes[0] + sizes[1]
    return np.asarray(total[~np.isnan(total)])


def _mean_request_tokens(findings: Findings, trial: Trial | None) -> float | None:
    if trial is None or not len(tokens := _tokens(findings, trial)):
        return None
    return float(tokens.mean())


def _peak_kv_share(findings: Findings, trace: str, replay: Trial | None) -> float | None:
    """KV cache that the most requests ever in service would fill at their mean length, as a share of what there is."""
    capacity, shares = _engine(replay, "kv_cache_tokens"), findings.shares(trace)
    mean = _mean_request_tokens(findings, replay)
    return max(shares) * mean / capacity if capacity and shares and mean else None


def _parameters(model: str) -> float | None:
    """Elements of the target's weights; None where it is not on this machine or its weights are packed."""
    try:
        checkpoint = read(model)
    except ConfigError:
        return None
    if checkpoint is None or not checkpoint.tensors or "quantization_config" in checkpoint.config:
        return None
    return float(sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values()))


def _prompt(request: Request) -> str:
    """The text of a prompt, for counting words in common."""
    if request.prompt is not None:
        return request.prompt
    contents: Sequence[Mapping[str, Any]] = request.messages or ()
    return " ".join(m["content"] if isinstance(m.get("content"), str) else json.dumps(m.get("content")) for m in contents)
