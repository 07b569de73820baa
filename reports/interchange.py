"""Measured acceptance in the forms that other tools read, each in its own convention.

What tau and the position rates are here: over *all* decode steps, the target's own token counted, so tau = 1 + Σ m_i. The forms differ:

- ``speculation_profile.json`` (NVIDIA Model-Optimizer, schema 1.0) holds conditional *and* marginal rates, by name.
- The golden acceptance YAML (InferenceX) holds tau by K.
- vLLM's synthetic acceptance takes marginal rates (or tau); SGLang's takes tau; TensorRT-LLM's counts accepted *draft* tokens, so
  it takes tau − 1.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import yaml

from reports.compare import candidate_of, measured
from reports.rundata import RunData

FOLDER = "interchange"
SCHEMA_VERSION = "1.0"
CHAINS = frozenset({"eagle2", "eagle3", "draft_model"})
"""Variants whose draft for K is the beginning of that for K + 1, so that one vector of rates gives tau for every smaller K."""

TOLERANCE = 0.02

Trial = Mapping[str, Any]


def write_interchange(run: RunData) -> list[Path]:
    """Write the files of every decision's speculative configuration below ``DIR/interchange``; none where acceptance is not known."""
    written: list[Path] = []
    for decision in run.result["decisions"]:
        config = candidate_of(run, decision)
        trial = _trial_of(run, decision["trace"], config) if config else None
        if trial is None or config is None:
            continue
        folder = run.folder / FOLDER / _slug(decision["trace"], config["variant"], f"k{config['k']}")
        folder.mkdir(parents=True, exist_ok=True)
        tau_by_k = taus_by_k(run, decision["trace"], config)
        categories = _categories(run, decision["trace"], config)
        texts = {
            "speculation_profile.json": _json(profile(trial, tau_by_k, categories, run.result["environment"])),
            "golden_acceptance.yaml": golden(trial, tau_by_k),
            "synthetic_acceptance.json": _json(synthetic(trial)),
        }
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
            written.append(folder / name)
    return written


def profile(
    trial: Trial, tau_by_k: Mapping[int, float], categories: Mapping[str, float], environment: Mapping[str, Any]
) -> dict[str, Any]:
    """NVIDIA's profile of one measured load; fields and checks as its own builder writes them."""
    config, spec = trial["config"], trial["speculation"]
    marginal = [float(rate) for rate in spec["position_rates"]]
    conditional = [rate / before if before > 0 else 0.0 for before, rate in pairwise([1.0, *marginal])]
    tau = float(spec["tau"])
    return {
        "schema_version": SCHEMA_VERSION,
        "measured": True,
        "method": config["variant"],
        "draft_checkpoint": {"id": _checkpoint(config.get("draft"))} if config.get("draft") else None,
        "target_model": {"id": _checkpoint(config["model"])},
        "num_speculative_tokens": config["k"],
        "block_size": None,
        "max_supported_k": config["k"],
        "verification_method": "longest_prefix",
        "conditional_accept_rates": [round(rate, 6) for rate in conditional],
        "marginal_accept_rates": [round(rate, 6) for rate in marginal],
        "mean_accept_length": round(tau, 6),
        "mean_accept_length_per_request": None,
        "accept_length_model": "chain_analytic" if config["variant"] in CHAINS else "measured_per_k",
        "accept_length_by_k": {str(k): round(value, 6) for k, value in sorted(tau_by_k.items())},
        "acceptance_length_histogram": histogram(marginal, spec["verify_steps"]),
        "per_category": {name: {"mean_accept_length": round(value, 6)} for name, value in categories.items()} or None,
        "measurement_conditions": {
            "dataset": trial["load"]["trace"],
            "concurrency": trial["load"]["concurrency"],
            "engine": config["backend"],
            "engine_version": (trial["engine"] or {}).get("version"),
            "gpu": [gpu.get("name") for gpu in environment["gpu"]],
            "drafted_steps": spec["drafted_steps"],
            "decode_steps": spec["verify_steps"],
        },
        "validation": _validation(marginal, tau),
    }


def _validation(marginal: Sequence[float], tau: float) -> dict[str, Any]:
    implied = 1.0 + math.fsum(marginal)
    rises = [
        {"position": i, "value": later, "previous": before}
        for i, (before, later) in enumerate(pairwise(marginal), start=1)
        if later > before + 1e-9
    ]
    return {
        "mean_consistency": {
            "implied_mean_accept_length": round(implied, 6),
            "reported_mean_accept_length": round(tau, 6),
            "abs_delta": round(abs(implied - tau), 6),
            "tolerance": TOLERANCE,
            "passed": abs(implied - tau) <= TOLERANCE,
        },
        "marginal_monotonicity": {"passed": not rises, "violations": rises},
    }


def histogram(marginal: Sequence[float], steps: int) -> dict[str, int]:
    """Decode steps by tokens emitted, 1..K+1: what the marginal rates of `steps` steps say."""
    survivors = [steps, *(round(rate * steps) for rate in marginal), 0]
    return {str(length): high - low for length, (high, low) in enumerate(pairwise(survivors), start=1)}


def golden(trial: Trial, tau_by_k: Mapping[int, float]) -> str:
    """The YAML of golden acceptance lengths: model, thinking state, K -> tau. The state is that of the trace's own requests, which
    nothing here tells; it is written as off."""
    curve = {k: round(value, 2) for k, value in sorted(tau_by_k.items())}
    head = (
        f"# Acceptance length (tokens a step, the target's own included) measured on {trial['load']['trace']!r}\n"
        f"# with {trial['config']['backend']} {(trial['engine'] or {}).get('version') or ''}\n"
    )
    return head + yaml.safe_dump({_checkpoint(trial["config"]["model"]): {"thinking_off": curve}}, sort_keys=False)


def synthetic(trial: Trial) -> dict[str, Any]:
    """Settings that force the measured acceptance in each engine, so that its speed can be measured on any text. Output is garbage."""
    config, spec = trial["config"], trial["speculation"]
    rates, tau = forced_rates(spec["position_rates"]), float(spec["tau"])
    length = f"{1 + math.fsum(rates):.4f}"
    return {
        "measured_tau": tau,
        "vllm": {
            "speculative_config": {
                "num_speculative_tokens": config["k"],
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": rates,
            }
        },
        "sglang": {
            "env": {
                "SGLANG_SIMULATE_ACC_LEN": length,
                "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
                "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
            }
        },
        "tensorrt_llm": {"env": {"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS": f"{math.fsum(rates):.4f}"}},
    }


def forced_rates(marginal: Sequence[float]) -> list[float]:
    """Marginal rates as vLLM takes them: within 0..1 and not increasing, which counts of a real run are but for noise."""
    rates: list[float] = []
    for rate in marginal:
        rates.append(round(min(max(float(rate), 0.0), rates[-1] if rates else 1.0), 6))
    return rates


def write_records(run: RunData) -> list[Path]:
    """All requests of all trials as one table, Parquet and CSV, with the trial's number, configuration and load in each row."""
    tables = []
    for trial in run.trials:
        path = run.folder / "trials" / f"{trial['number']:04d}" / "requests.parquet"
        if not path.exists():
            continue
        table = pq.read_table(path)
        known = {
            "trial": trial["number"],
            "stage": trial.get("stage") or trial["role"],
            "engine": trial["config"]["backend"],
            "variant": trial["config"]["variant"],
            "k": trial["config"]["k"],
            "weight_quantization": trial["config"].get("weight_quantization", "none"),
            "kv_cache_dtype": trial["config"].get("kv_cache_dtype", "auto"),
            "load": trial["load"]["mode"],
            "concurrency": trial["load"]["concurrency"],
            "trace": trial["load"]["trace"],
        }
        for name, value in reversed(known.items()):
            kind = pa.int64() if name in ("trial", "k", "concurrency") else pa.string()
            table = table.add_column(0, name, pa.array([value] * table.num_rows, kind))
        tables.append(table)
    if not tables:
        return []
    folder = run.folder / FOLDER
    folder.mkdir(exist_ok=True)
    records = pa.concat_tables(tables, promote_options="permissive")
    pq.write_table(records, folder / "records.parquet")
    flat = records.drop_columns([name for name in ("chunk_s", "chunk_tokens") if name in records.column_names])
    pc.write_csv(flat, folder / "records.csv")
    return [folder / "records.parquet", folder / "records.csv"]


def taus_by_k(run: RunData, trace: str, config: Mapping[str, Any]) -> dict[int, float]:
    """tau of every K measured for this variant, draft and server; the latest trial of each."""
    same = {name: value for name, value in config.items() if name != "k"}
    found = {}
    for trial in run.trials:
        if not measured(trial) or trial["load"]["trace"] != trace or not trial["speculation"]["tau"]:
            continue
        if {name: value for name, value in trial["config"].items() if name != "k"} == same:
            found[trial["config"]["k"]] = float(trial["speculation"]["tau"])
    return found


def _trial_of(run: RunData, trace: str, config: Mapping[str, Any]) -> Trial | None:
    """The measured load of `config` with the most decode steps, which knows its rates best."""
    mine = [
        t
        for t in run.trials
        if measured(t)
        and t["config"] == config
        and t["load"]["trace"] == trace
        and t["speculation"]["position_rates"]
        and t["speculation"]["tau"]
        and t["speculation"]["verify_steps"]
    ]
    return max(mine, key=lambda t: t["speculation"]["verify_steps"], default=None)


def _categories(run: RunData, trace: str, config: Mapping[str, Any]) -> dict[str, float]:
    parts = (p for p in run.result.get("acceptance") or [] if p["trace"] == trace and p["config"] == config)
    return {group["group"]: group["tau"] for part in parts for group in part["by_category"]}


def _checkpoint(name: str | None) -> str:
    """A repository id as it is; of a folder only its name, since files like these are published and paths are nobody's business."""
    text = str(name)
    return text if re.fullmatch(r"[\w.-]+/[\w.-]+", text) else text.rstrip("/").rsplit("/", 1)[-1]


def _slug(*parts: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def _json(data: Any) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
