"""Production flags are the baseline as it stands: what they set is in every configuration, off included."""

from __future__ import annotations

from backends.types import WorkloadFacts
from harness.settings import RunSettings
from harness.space import build_space


def test_settings_of_the_production_command_line_reach_off_and_every_candidate() -> None:
    base = ("--max-num-seqs", "256", "--no-enable-prefix-caching", "--quantization", "fp8")
    settings = RunSettings(traces=("t",), out="o", backends=("vllm",), k=(2,), base_args={"vllm": base})
    servers = build_space(settings, "m", WorkloadFacts()).servers
    assert [s.variant for s in servers] == ["off", "ngram"]
    assert {(s.max_num_seqs, s.prefix_caching, s.weight_quantization) for s in servers} == {(256, False, "fp8")}


def test_a_quantization_that_was_asked_for_stays() -> None:
    settings = RunSettings(
        traces=("t",), out="o", backends=("vllm",), k=(2,), quantization=("awq",), base_args={"vllm": ("--quantization", "fp8")}
    )
    assert {s.weight_quantization for s in build_space(settings, "m", WorkloadFacts()).servers} == {"awq"}
