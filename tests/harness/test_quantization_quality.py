"""What quantizing costs is known by weights and KV cache together, and decides what may win."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from backends.types import BackendError, ServingConfig, WorkloadFacts
from harness.findings import Findings
from harness.quality import measure_quality, quality_key
from harness.settings import RunSettings
from harness.space import build_space
from workloads.types import Request

PLAIN = ServingConfig("reference", "m")


def test_configurations_of_equal_quality_have_one_key() -> None:
    assert quality_key(PLAIN) == quality_key(replace(PLAIN, variant="ngram", k=3, max_num_seqs=8)) == "none"
    assert quality_key(replace(PLAIN, weight_quantization="int4")) == "int4"
    assert quality_key(replace(PLAIN, kv_cache_dtype="int8")) == "none, int8 KV cache"
    assert quality_key(replace(PLAIN, weight_quantization="int4", kv_cache_dtype="fp8")) == "int4, fp8 KV cache"


def test_a_kv_cache_that_the_user_does_not_run_wins_only_within_the_accepted_loss(tiny_model: Path) -> None:
    """int8 weights lose 0.5 %, with an int8 KV cache beside them 2 %; the cache alone was not measured."""
    settings = RunSettings(
        traces=("t",), out="o", model=str(tiny_model), quantization=("none", "int8"), kv_cache_dtype=("auto", "int8"), k=(2,)
    )
    space = build_space(replace(settings, max_quality_loss=0.01), str(tiny_model), WorkloadFacts())
    assert space.infeasible == ()
    findings = Findings(replace(settings, max_quality_loss=0.01), space, records_of=lambda _: {})
    findings.quality = {"int8": {"greedy_agreement": 0.995}, "int8, int8 KV cache": {"greedy_agreement": 0.98}}
    assert {quality_key(c): findings.may_win(c) for c in space.candidates} == {
        "none": True,
        "none, int8 KV cache": False,
        "int8": True,
        "int8, int8 KV cache": False,
    }


def test_quality_is_measured_for_each_pair(tiny_model: Path) -> None:
    plain = replace(PLAIN, model=str(tiny_model))
    others = [replace(plain, kv_cache_dtype="fp8"), replace(plain, weight_quantization="int8", kv_cache_dtype="int8")]
    requests = [Request(i, None, prompt=f"again and again number {i}") for i in range(3)]
    found = measure_quality(requests, baseline=plain, others=others)
    assert list(found) == ["none, fp8 KV cache", "int8, int8 KV cache"]
    assert all(entry["mean_kl"] > 0 and 0 <= entry["greedy_agreement"] <= 1 for entry in found.values())
    with pytest.raises(BackendError, match="the quality of none, fp7 KV cache could not be measured: unknown kv_cache_dtype"):
        measure_quality(requests, baseline=plain, others=[replace(plain, kv_cache_dtype="fp7")])
