"""TensorRT-LLM's YAML and command line for each decoding type, held against the engine's own schema. Nothing is started."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt, ValidationError, create_model

from backends import tensorrt_llm as trt
from backends.counters import parse_metrics
from backends.types import ConfigError, Endpoint, Launch, ServingConfig, WorkloadFacts
from tests.engines.tensorrt_llm_schema import extract

SCHEMA = json.loads((Path(__file__).parents[1] / "data" / "tensorrt_llm" / "llm_args.json").read_text())["classes"]
FACTS = WorkloadFacts()
MAIN = {"engine_version": "1.3.0"}
SERVE_FLAGS = {"--host", "--port", "--served_model_name", "--tp_size", "--max_batch_size", "--config"}


class _Mode(StrEnum):
    FULL = "full"
    NO_TOPK = "no_topk"
    NO_TOPP = "no_topp"
    NO_TOPK_NO_TOPP = "no_topk_no_topp"


def _models() -> dict[str, type[BaseModel]]:
    """Strict models (an unknown key is an error, like upstream's) from the recorded classes."""
    names: dict[str, Any] = {
        "Optional": Optional, "Union": Union, "List": list, "Set": set, "Literal": Literal, "Path": Path, "dict": dict,
        "PositiveInt": PositiveInt, "NonNegativeInt": NonNegativeInt, "NonNegativeFloat": NonNegativeFloat,
        "AdvancedSamplingMode": _Mode,
    }  # fmt: skip
    for name, entry in SCHEMA.items():
        fields: dict[str, Any] = {
            # Annotations of a recorded file of our own, in names that are all given above.
            field: (eval(spec["annotation"], {"__builtins__": {}}, {**names, "str": str, "int": int, "float": float, "bool": bool}),
                    ... if spec["required"] else None)
            for field, spec in entry["fields"].items()
        }  # fmt: skip
        parent = names.get(entry["parent"])
        strict = None if parent else ConfigDict(extra="forbid")
        names[name] = create_model(name, __base__=parent, __config__=strict, **fields)
    return {name: names[name] for name in SCHEMA}


MODELS = _models()
DECODING = {
    fields["fields"]["decoding_type"]["annotation"].split("'")[1]: MODELS[name]
    for name, fields in SCHEMA.items()
    if "decoding_type" in fields["fields"]
}
SERVE = create_model(
    "TorchLlmArgs",
    __config__=ConfigDict(extra="forbid"),
    kv_cache_config=(MODELS["KvCacheConfig"], ...),
    cuda_graph_config=(MODELS["DecodeCudaGraphConfig"], ...),
    speculative_config=(dict[str, Any] | None, None),
    enable_chunked_prefill=(bool, ...),
    disable_overlap_scheduler=(bool, ...),
    enable_iter_perf_stats=(bool, ...),
    return_perf_metrics=(bool, ...),
    max_num_tokens=(int | None, None),
)


def config(variant: str = "off", k: int = 0, **changes: Any) -> ServingConfig:
    fields: dict[str, Any] = {"backend": "tensorrt_llm", "model": "org/target", "variant": variant, "k": k, "extra": MAIN}
    return ServingConfig(**{**fields, **changes})


def start(settings: ServingConfig, *base: str) -> Launch:
    return trt.launch(settings, port=8123, command=("trtllm-serve",), base_args=base)


def document(launch: Launch) -> dict[str, Any]:
    """The launch's YAML, valid under the strict schema."""
    loaded = yaml.safe_load(launch.files[trt.CONFIG_FILE])
    SERVE.model_validate(loaded)
    spec = loaded.get("speculative_config")
    if spec is not None:
        DECODING[spec["decoding_type"]].model_validate(spec)
    assert isinstance(loaded, dict)
    return loaded


def spec_of(settings: ServingConfig) -> dict[str, Any]:
    spec = document(start(settings))["speculative_config"]
    assert isinstance(spec, dict)
    return spec


def test_off_states_every_setting_that_a_measurement_depends_on() -> None:
    launch = start(config(max_num_seqs=32))
    assert " ".join(launch.argv) == (
        "trtllm-serve org/target --host 127.0.0.1 --port 8123 --served_model_name model --tp_size 1 --max_batch_size 32"
        " --config {folder}/llm_args.yaml"
    )
    assert document(launch) == {
        "kv_cache_config": {"enable_block_reuse": True, "dtype": "auto"},
        "cuda_graph_config": {"max_batch_size": 32, "enable_padding": True},
        "enable_chunked_prefill": True,
        "disable_overlap_scheduler": False,
        "enable_iter_perf_stats": True,
        "return_perf_metrics": True,
    }


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (config("ngram", 4), {"decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 4}),
        (config("suffix", 4), {"decoding_type": "SA", "max_draft_len": 4, "max_matching_ngram_size": -1}),
        (
            config("draft_model", 3, draft="org/d"),
            {"decoding_type": "Draft_Target", "max_draft_len": 3, "speculative_model": "org/d"},
        ),
        (
            config("draft_model", 3, draft="org/d", extra={**MAIN, "parallel_drafting": True}),
            {"decoding_type": "PARD", "max_draft_len": 3, "speculative_model": "org/d"},
        ),
        (config("eagle3", 5, draft="org/e"), {"decoding_type": "Eagle3", "max_draft_len": 5, "speculative_model": "org/e"}),
        (
            config("eagle3", 5, draft="org/e", topk=4, num_draft_tokens=13),
            {"use_dynamic_tree": True, "dynamic_tree_max_topK": 4, "max_total_draft_tokens": 12, "max_draft_len": 5},
        ),
        (config("mtp", 2), {"decoding_type": "MTP", "max_draft_len": 2}),
        (config("dflash", 7, draft="org/f"), {"decoding_type": "DFlash", "max_draft_len": 7}),
        (config("dspark", 7, draft="org/s"), {"decoding_type": "DSpark", "max_draft_len": 7, "block_size": 7}),
    ],
)
def test_each_decoding_type_is_valid_under_the_engines_schema(settings: ServingConfig, expected: dict[str, Any]) -> None:
    assert trt.supports(settings, FACTS) is None
    assert expected.items() <= spec_of(settings).items()


def test_every_variant_is_covered_by_a_decoding_type_of_the_schema() -> None:
    drafts = {"draft_model", "eagle3", "dflash", "dspark"}
    kinds = {spec_of(config(v, 4, draft="org/d" if v in drafts else None))["decoding_type"] for v in trt.VARIANTS - {"off"}}
    assert kinds == set(DECODING) - {"Eagle", "PARD"}


def test_the_schema_refuses_an_unknown_key() -> None:
    with pytest.raises(ValidationError, match="draft_tokens"):
        DECODING["NGram"].model_validate({"decoding_type": "NGram", "max_draft_len": 4, "draft_tokens": 1})


def test_command_line_flags_are_those_of_trtllm_serve() -> None:
    assert {part for part in start(config("ngram", 4)).argv if part.startswith("--")} <= SERVE_FLAGS


@pytest.mark.parametrize(
    ("variant", "overlap_off"), [("ngram", True), ("draft_model", True), ("eagle3", False), ("mtp", False)]
)
def test_the_overlap_scheduler_is_off_where_the_method_needs_it(variant: str, overlap_off: bool) -> None:
    draft = "org/d" if variant in ("draft_model", "eagle3") else None
    assert document(start(config(variant, 3, draft=draft)))["disable_overlap_scheduler"] is overlap_off


def test_version_1_2_spells_mtp_by_layers_and_has_no_trees() -> None:
    old = {"engine_version": "1.2.1"}
    assert trt.speculative_config(config("mtp", 2, extra=old), (1, 2, 1)) == {
        "decoding_type": "MTP",
        "num_nextn_predict_layers": 2,
    }
    with pytest.raises(ConfigError, match=r"a draft tree needs TensorRT-LLM a version after 1\.2, this is 1\.2\.1"):
        start(config("eagle3", 5, draft="org/e", topk=4, num_draft_tokens=13, extra=old))
    with pytest.raises(ConfigError, match="variant 'suffix' needs"):
        start(config("suffix", 5, extra=old))
    assert "--served_model_name" not in start(config(extra=old)).argv


def test_a_schedule_of_k_becomes_upper_batch_sizes() -> None:
    schedule = {**MAIN, "k_schedule": [[1, 4, 4], [5, 8, 2], [9, 32, 1], [33, 64, 0]]}
    spec = spec_of(config("eagle3", 4, draft="org/e", extra=schedule))
    assert spec["draft_len_schedule"] == {4: 4, 8: 2, 32: 1}
    assert min(spec["draft_len_schedule"]) == 4  # its K must be max_draft_len
    assert spec["draft_len_schedule"][4] == spec["max_draft_len"]


def test_a_schedule_that_only_ends_speculation_is_a_cut_off() -> None:
    spec = spec_of(config("ngram", 4, extra={**MAIN, "k_schedule": [[1, 16, 4], [17, 64, 0]]}))
    assert spec["max_concurrency"] == 16
    assert "draft_len_schedule" not in spec


def test_the_open_end_of_a_schedule_goes_on_with_its_last_k() -> None:
    spec = spec_of(config("ngram", 4, max_num_seqs=64, extra={**MAIN, "k_schedule": [[1, 8, 4], [9, 16, 2]]}))
    assert spec["draft_len_schedule"] == {8: 4, 64: 2}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (config("medusa", 3, draft="org/m"), "it left with the TensorRT backend"),
        (config("eagle2", 3, draft="org/e"), "reads every EAGLE head as EAGLE-3"),
        (config("eagle3", 3), "needs a draft checkpoint"),
        (config("ngram", 3, topk=2, num_draft_tokens=5), "topk must be 1"),
        (config("eagle3", 3, draft="org/e", topk=4, num_draft_tokens=14), "has 4 to 13 nodes to verify, not 14"),
        (config("eagle3", 3, draft="org/e", topk=4), "give --tree-nodes"),
        (config(weight_quantization="fp8"), "name a checkpoint that is quantized so"),
        (config(kv_cache_dtype="fp8_e5m2"), "no KV-cache type 'fp8_e5m2'"),
        (config("ngram", 4, extra={"k_schedule": [[1, 8, 2]]}), "wants the configuration's K = 4 there"),
    ],
)
def test_what_cannot_run_is_refused_with_its_rule(settings: ServingConfig, reason: str) -> None:
    assert reason in (trt.supports(settings, FACTS) or "")


def test_the_users_settings_file_lies_below_the_candidates_own(tmp_path: Path) -> None:
    production = tmp_path / "production.yaml"
    production.write_text(
        "kv_cache_config: {free_gpu_memory_fraction: 0.8, dtype: fp8}\nmax_num_tokens: 4096\n"
        "speculative_config: {decoding_type: NGram, max_draft_len: 9}\n"
    )
    base = ("--extra_llm_api_options", str(production), "--max_seq_len", "4096")
    launch = start(config("mtp", 2, kv_cache_dtype="fp8"), *base)
    loaded = document(launch)
    assert loaded["kv_cache_config"] == {"free_gpu_memory_fraction": 0.8, "dtype": "fp8", "enable_block_reuse": True}
    assert loaded["max_num_tokens"] == 4096
    assert loaded["speculative_config"]["decoding_type"] == "MTP"
    assert "speculative_config" not in document(start(config(), *base))
    assert launch.argv[-2:] == ("--max_seq_len", "4096")
    assert trt.base_settings(base) == {"chunked_prefill": False, "kv_cache_dtype": "fp8"}


def test_a_memory_share_on_the_command_line_is_not_lost_to_the_file() -> None:
    loaded = document(start(config(), "--kv_cache_free_gpu_memory_fraction", "0.75"))
    assert loaded["kv_cache_config"]["free_gpu_memory_fraction"] == 0.75


def test_an_unreadable_settings_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the settings file '.*missing.yaml': .*No such file"):
        start(config(), "--config", str(tmp_path / "missing.yaml"))


def test_kv_cache_tokens_come_from_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt, "call", lambda *_, **__: None)
    log = "[TensorRT-LLM][INFO] [MemUsageChange] Allocated 78.30 GiB for max tokens in paged KV cache (3731744)."
    endpoint = trt.read_back(Endpoint("http://127.0.0.1:1", "model", "tensorrt_llm"), config(), log)
    assert endpoint.kv_cache_tokens == 3731744
    assert endpoint.version is None
    assert "unverified" in endpoint.warnings[0]


@pytest.mark.parametrize(
    ("choice", "tau"), [({"avg_decoded_tokens_per_iter": 2.5}, 2.5), ({"avg_decoded_tokens_per_iter": 0}, None), ({}, None)]
)
def test_zero_tokens_per_step_means_unknown(choice: dict[str, Any], tau: float | None) -> None:
    assert trt.tokens_per_step(choice) == tau


def test_its_statistics_page_gives_the_known_tau_of_drafted_steps() -> None:
    page = (
        'trtllm_spec_decode_drafted_tokens_total{token_position="0"} 100\n'
        'trtllm_spec_decode_drafted_tokens_total{token_position="1"} 100\n'
        'trtllm_spec_decode_accepted_tokens_total{token_position="0"} 70\n'
        'trtllm_spec_decode_accepted_tokens_total{token_position="1"} 40\n'
    )
    counters, _ = parse_metrics("tensorrt_llm", page)
    assert counters.tau_drafted == pytest.approx(1 + 110 / 100)


def test_the_schema_script_reads_parents_annotations_and_required_fields() -> None:
    source = (
        "class DecodingBaseConfig(StrictBaseModel):\n"
        "    max_draft_len: Optional[NonNegativeInt] = Field(default=None, description='x')\n"
        "    _hidden: bool = PrivateAttr(True)\n"
        "    kind: ClassVar[str] = 'x'\n"
        "class NGramDecodingConfig(DecodingBaseConfig):\n"
        "    is_keep_all: bool\n"
        "class Unrelated:\n"
        "    x: int = 1\n"
    )
    assert extract(source) == {
        "DecodingBaseConfig": {
            "parent": None, "fields": {"max_draft_len": {"annotation": "Optional[NonNegativeInt]", "required": False}},
        },
        "NGramDecodingConfig": {
            "parent": "DecodingBaseConfig", "fields": {"is_keep_all": {"annotation": "bool", "required": True}},
        },
    }  # fmt: skip
