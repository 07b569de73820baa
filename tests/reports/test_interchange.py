"""What other tools are given, read back by the rules those tools have.

The rules are restated here: NVIDIA's identity and monotonicity checks; vLLM's for synthetic rates (one for each position, within
0..1, not increasing); SGLang's length with the target's own token; TensorRT-LLM's count without it.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from run_builder import RunSpec, build_run
from run_sections import SECRET

from reports.interchange import forced_rates, histogram, write_interchange, write_records
from reports.rundata import load_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(tmp_path_factory.mktemp("run"), RunSpec(requests=12, batch_sizes=(1, 16)))


@pytest.fixture(scope="module")
def files(run_dir: Path) -> dict[str, Any]:
    written = write_interchange(load_run(run_dir, show_text=False))
    assert {path.parent for path in written} == {run_dir / "interchange" / "prod-jsonl-draft-model-k3"}
    return {path.name: (json.loads if path.suffix == ".json" else yaml.safe_load)(path.read_text()) for path in written}


RATES = [0.82, 0.82**2 * 0.97, 0.82**3 * 0.97**3]  # of the built run's draft model


def test_the_profile_holds_both_conventions_and_its_own_checks_pass(files: dict[str, Any]) -> None:
    profile = files["speculation_profile.json"]
    assert (profile["schema_version"], profile["measured"], profile["method"]) == ("1.0", True, "draft_model")
    assert profile["marginal_accept_rates"] == pytest.approx(RATES, abs=1e-4)
    product = 1.0
    for conditional, marginal in zip(profile["conditional_accept_rates"], profile["marginal_accept_rates"], strict=True):
        product *= conditional
        assert product == pytest.approx(marginal, abs=1e-5)
    assert profile["mean_accept_length"] == pytest.approx(1 + sum(RATES), abs=1e-3)
    assert profile["validation"]["mean_consistency"]["passed"] is True
    assert profile["validation"]["marginal_monotonicity"] == {"passed": True, "violations": []}
    assert len(profile["marginal_accept_rates"]) == profile["num_speculative_tokens"] == 3
    assert profile["accept_length_model"] == "chain_analytic"
    assert set(profile["accept_length_by_k"]) == {"1", "3", "5"}
    assert "/" not in profile["target_model"]["id"]


def test_the_histogram_gives_the_mean_back(files: dict[str, Any]) -> None:
    profile = files["speculation_profile.json"]
    counts = {int(length): count for length, count in profile["acceptance_length_histogram"].items()}
    steps = sum(counts.values())
    assert steps == profile["measurement_conditions"]["decode_steps"]
    mean = sum(length * count for length, count in counts.items()) / steps
    assert mean == pytest.approx(profile["mean_accept_length"], abs=0.02)
    assert histogram([0.5, 0.25], 100) == {"1": 50, "2": 25, "3": 25}


def test_the_golden_curve_is_keyed_by_model_state_and_whole_k(files: dict[str, Any]) -> None:
    (model, states), *others = files["golden_acceptance.yaml"].items()
    assert (model, others) == ("SmolLM2-135M-Instruct", [])
    curve = states["thinking_off"]
    assert list(curve) == [1, 3, 5]
    assert curve[1] == pytest.approx(1.82)
    assert all(1.0 <= tau <= k + 1 for k, tau in curve.items())


def test_each_engine_gets_the_measured_tau_in_its_own_convention(files: dict[str, Any]) -> None:
    given = files["synthetic_acceptance.json"]
    tau = given["measured_tau"]
    config = given["vllm"]["speculative_config"]
    rates = config["synthetic_acceptance_rates"]
    assert config["rejection_sample_method"] == "synthetic"
    assert len(rates) == config["num_speculative_tokens"]
    assert all(0 <= rate <= 1 for rate in rates)
    assert rates == sorted(rates, reverse=True)
    assert 1 + sum(rates) == pytest.approx(tau, abs=1e-4)
    sglang = given["sglang"]["env"]
    assert float(sglang["SGLANG_SIMULATE_ACC_LEN"]) == pytest.approx(tau, abs=1e-3)
    assert sglang["SGLANG_SIMULATE_ACC_METHOD"] == "match-expected"
    assert sglang["SGLANG_SIMULATE_ACC_TOKEN_MODE"] == "real-draft-token"
    forced = given["tensorrt_llm"]["env"]["TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"]
    assert float(forced) + 1 == pytest.approx(tau, abs=1e-3)


@given(st.lists(st.floats(-0.1, 1.1), min_size=1, max_size=10))
def test_forced_rates_are_always_what_vllm_takes(measured: list[float]) -> None:
    rates = forced_rates(measured)
    assert len(rates) == len(measured)
    assert all(0 <= rate <= 1 for rate in rates)
    assert rates == sorted(rates, reverse=True)


def test_records_of_all_trials_are_one_table_in_both_forms_and_hold_no_text(run_dir: Path) -> None:
    parquet, text = write_records(load_run(run_dir, show_text=False))
    table = pq.read_table(parquet)
    result = json.loads((run_dir / "result.json").read_text())
    sent = {t["number"]: t["metrics"]["requests"]["sent"] for t in result["trials"] if t["metrics"]}
    rows = table.group_by("trial").aggregate([("index", "count")]).to_pylist()
    assert {row["trial"]: row["index_count"] for row in rows} == sent
    with text.open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == table.num_rows
    assert [float(line["e2e_s"] or "nan") for line in lines[:5]] == pytest.approx(table["e2e_s"][:5].to_pylist(), nan_ok=True)
    assert {line["variant"] for line in lines} == {"off", "ngram", "draft_model"}
    assert SECRET not in text.read_text()


def test_a_run_without_acceptance_gets_no_files(tmp_path: Path) -> None:
    run = load_run(build_run(tmp_path, RunSpec(requests=12, all_fail=True)), show_text=False)
    assert write_interchange(run) == []
    assert write_records(run) == []
    assert not (tmp_path / "interchange").exists()
