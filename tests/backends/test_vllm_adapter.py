"""vLLM's command line for each variant and version, and what is read back from its log and metrics page."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backends import vllm, vllm_log
from backends.installed import parse_version
from backends.types import ConfigError, Launch, ServingConfig, WorkloadFacts


def config(variant: str = "off", k: int = 0, **changes: Any) -> ServingConfig:
    return ServingConfig(**{"backend": "vllm", "model": "org/target", "variant": variant, "k": k, **changes})


def start(settings: ServingConfig, *base: str, command: tuple[str, ...] = ("vllm", "serve")) -> Launch:
    return vllm.launch(settings, port=8123, command=command, base_args=base)


def spec_of(launch: Launch) -> dict[str, Any]:
    parsed = json.loads(launch.argv[launch.argv.index("--speculative-config") + 1])
    assert isinstance(parsed, dict)
    return parsed


def test_off_states_every_setting_that_a_measurement_depends_on() -> None:
    assert " ".join(start(config(max_num_seqs=32)).argv) == (
        "vllm serve org/target --host 127.0.0.1 --port 8123 --served-model-name model --tensor-parallel-size 1"
        " --max-num-seqs 32 --enable-chunked-prefill --enable-prefix-caching"
    )


def test_off_and_on_differ_by_speculation_alone() -> None:
    on = config("ngram", 4, max_num_seqs=16, chunked_prefill=False)
    off_argv, on_argv = start(on.off()).argv, start(on).argv
    assert on_argv[: len(off_argv)] == off_argv
    assert on_argv[len(off_argv) :][0] == "--speculative-config"


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("ngram", {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}),
        (
            "draft_model",
            {
                "method": "draft_model",
                "num_speculative_tokens": 3,
                "model": "org/draft",
                "draft_tensor_parallel_size": 2,
                "kv_cache_dtype": "fp8",
            },
        ),
        ("medusa", {"method": "medusa", "num_speculative_tokens": 3, "model": "org/draft"}),
        (
            "p_eagle",
            {
                "method": "eagle3",
                "num_speculative_tokens": 3,
                "model": "org/draft",
                "parallel_drafting": True,
                "draft_tensor_parallel_size": 2,
                "kv_cache_dtype": "fp8",
            },
        ),
        (
            "mtp",
            {"method": "mtp", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 2, "kv_cache_dtype": "fp8"},
        ),
    ],
)
def test_a_draft_inherits_nothing_silently(variant: str, expected: dict[str, Any]) -> None:
    draft = None if variant in ("ngram", "mtp") else "org/draft"
    assert spec_of(start(config(variant, 3, draft=draft, tensor_parallel=2, kv_cache_dtype="fp8"))) == expected


@pytest.mark.parametrize(
    ("variant", "method"), [("eagle2", "eagle"), ("eagle3", "eagle3"), ("suffix", "suffix"), ("dflash", "dflash")]
)
def test_each_variant_has_its_method(variant: str, method: str) -> None:
    assert spec_of(start(config(variant, 2, draft="org/draft")))["method"] == method


def test_a_schedule_of_k_becomes_vllms() -> None:
    settings = config("ngram", 5, extra={"k_schedule": [[1, 8, 5], [9, 32, 2], [33, 64, 0]]})
    assert spec_of(start(settings))["num_speculative_tokens_per_batch_size"] == [[1, 8, 5], [9, 32, 2], [33, 64, 0]]


@pytest.mark.parametrize(
    ("schedule", "fault"),
    [
        ([[2, 8, 5]], "start at batch size 1"),
        ([[1, 8, 5], [8, 9, 2]], "do not overlap"),
        ([[1, 8, 6]], "between 0 and the configuration's K = 5"),
        ([[1, 8]], "is not [first batch size"),
    ],
)
def test_a_wrong_schedule_is_refused_before_the_start(schedule: list[list[int]], fault: str) -> None:
    reason = vllm.supports(config("ngram", 5, extra={"k_schedule": schedule}), WorkloadFacts())
    assert reason is not None
    assert fault in reason


def test_extra_flags_pass_through_and_replace_the_users_own() -> None:
    settings = config(extra={"max_model_len": 4096, "enforce_eager": True, "async_scheduling": False, "env": {"A": 1}})
    launch = start(settings, "--max-model-len", "8192", "--dtype=bfloat16")
    text = " ".join(launch.argv)
    assert "--dtype bfloat16" in text
    assert "--max-model-len 4096 --enforce-eager --no-async-scheduling" in text
    assert "8192" not in text
    assert launch.env == {"VLLM_NO_USAGE_STATS": "1", "A": "1"}


def test_keys_of_the_speculative_config_pass_through() -> None:
    settings = config("ngram", 4, extra={"speculative": {"prompt_lookup_max": 8, "attention_backend": "FLASH_ATTN"}})
    spec = spec_of(start(settings))
    assert (spec["prompt_lookup_min"], spec["prompt_lookup_max"], spec["attention_backend"]) == (2, 8, "FLASH_ATTN")


def test_production_flags_are_the_baseline_and_its_speculation_is_dropped() -> None:
    base = ("--gpu-memory-utilization", "0.95", "-tp", "4", "--max-num-seqs=256", "--no-enable-prefix-caching",
            "--speculative-config", '{"method":"ngram"}', "--port", "9000", "--quantization", "fp8")  # fmt: skip
    fields = vllm.base_settings(base)
    assert fields == {"tensor_parallel": 4, "max_num_seqs": 256, "prefix_caching": False, "weight_quantization": "fp8"}
    text = " ".join(start(config(**fields), *base).argv)
    assert text.count("--quantization fp8") == 1
    assert text.count("--tensor-parallel-size 4") == 1
    assert "--no-enable-prefix-caching" in text
    assert "--gpu-memory-utilization 0.95" in text
    assert "9000" not in text
    assert "ngram" not in text


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (("--api-key", "secret"), "--api-key-env"),
        (("--trust-remote-code",), "never run"),
        (("org/model", "--x"), "begin with 'org/model'"),
        (("--max-num-seqs", "many"), "--max-num-seqs needs a whole number, not 'many'"),
    ],
)
def test_base_arguments_that_must_not_be_are_one_clear_line(base: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        vllm.base_settings(base)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("command", "begin"),
    [
        (("vllm", "serve"), "vllm serve org/target --host"),
        (("/opt/v/bin/python",), "/opt/v/bin/python -m vllm.entrypoints.openai.api_server --model org/target --host"),
        (
            ("docker", "run", "--rm", "--network=host", "vllm/vllm-openai"),
            "docker run --rm --network=host vllm/vllm-openai org/target",
        ),
    ],
)
def test_the_engine_lives_where_the_user_says(command: tuple[str, ...], begin: str) -> None:
    assert " ".join(start(config(), command=command).argv).startswith(begin)


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"variant": "eagle2", "k": 3, "draft": "d", "topk": 4, "num_draft_tokens": 8}, "chains only"),
        ({"variant": "eagle3", "k": 3}, "needs a draft checkpoint"),
        ({"variant": "draft_model", "k": 3, "draft": "self-int4"}, "reference engine only"),
        ({"weight_quantization": "int4"}, "no weight quantization 'int4'"),
        ({"extra": {"trust_remote_code": True}}, "never run"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(changes: dict[str, Any], fragment: str) -> None:
    reason = vllm.supports(config(**changes), WorkloadFacts())
    assert reason is not None
    assert fragment in reason


def test_sampling_parameters_that_speculation_refuses_exclude_the_variant_and_not_off() -> None:
    facts = WorkloadFacts(sampling_parameters=frozenset({"temperature", "min_p"}))
    assert "400 to min_p" in (vllm.supports(config("ngram", 3), facts) or "")
    assert vllm.supports(config(), facts) is None


@pytest.mark.parametrize(
    ("version", "flags"),
    [
        (
            (0, 8, 1),
            "--num-speculative-tokens 3 --speculative-model [ngram] --ngram-prompt-lookup-max 4 --ngram-prompt-lookup-min 2",
        ),
        ((0, 8, 2), '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_min":2,"prompt_lookup_max":4}'),
    ],
)
def test_old_versions_get_the_flags_they_had(version: tuple[int, ...], flags: str) -> None:
    assert flags in " ".join(vllm.speculative_flags(config("ngram", 3), version))


def test_a_draft_model_in_vllm_0_8_1_takes_the_old_family() -> None:
    flags = " ".join(vllm.speculative_flags(config("draft_model", 3, draft="d"), (0, 8, 1)))
    assert flags == "--num-speculative-tokens 3 --speculative-model d --speculative-draft-tensor-parallel-size 1"


@pytest.mark.parametrize(
    ("variant", "version", "ok"),
    [
        ("draft_model", (0, 9, 2), True),  # V0
        ("draft_model", (0, 14, 1), False),  # V0 gone, V1 without it
        ("draft_model", (0, 15, 1), True),
        ("suffix", (0, 10, 2), False),
        ("p_eagle", (0, 15, 1), False),
        ("p_eagle", (0, 16, 0), True),
        ("dflash", (0, 19, 1), False),
        ("dspark", (0, 24, 0), False),
    ],
)
def test_a_variant_that_the_version_lacks_is_refused(variant: str, version: tuple[int, ...], ok: bool) -> None:
    settings = config(variant, 3, draft="d")
    if ok:
        assert vllm.speculative_flags(settings, version)
    else:
        with pytest.raises(ConfigError, match=f"variant '{variant}' needs vLLM"):
            vllm.speculative_flags(settings, version)


def test_settings_follow_the_version() -> None:
    head = config("eagle3", 3, draft="d")
    assert "kv_cache_dtype" not in vllm.speculative_config(head, (0, 24, 0))
    assert vllm.speculative_config(head, (0, 26, 0))["kv_cache_dtype"] == "auto"
    assert vllm.speculative_config(config("mtp", 1), (0, 10, 2))["method"] == "deepseek_mtp"
    with pytest.raises(ConfigError, match=r"schedule of K by batch size needs vLLM 0\.24"):
        vllm.speculative_config(config("ngram", 3, extra={"k_schedule": [[1, 8, 3]]}), (0, 23, 0))


# Shortened from the log of a real vLLM 0.32.0 that drafted with its own target on a CPU.
LOG = """
(APIServer pid=1) INFO [api_utils.py:286] non-default args: {'max_num_seqs': 8, 'enable_chunked_prefill': False}
(EngineCore pid=2) INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m', \
speculative_config=SpeculativeConfig(method='draft_model', model='/models/d', num_spec_tokens=3), dtype=torch.float32, \
max_seq_len=2048, tensor_parallel_size=1, quantization=None, enforce_eager=True, kv_cache_dtype=auto, device_config=cpu, \
enable_prefix_caching=True, enable_chunked_prefill=False, compilation_config={'cudagraph_capture_sizes': [1, 2, 4], 'x': 1}
(APIServer pid=1) WARNING [vllm.py:2276] max_num_scheduled_tokens is set to 2048 based on the speculative decoding settings.
(Worker pid=3) INFO [default_loader.py:501] Loading weights took 2.32 seconds
(EngineCore pid=2) INFO [kv_cache_utils.py:2327] CPU KV cache size: 11,648 tokens, \
Maximum concurrency for 2,048 tokens per request: 5.69x
(EngineCore pid=2) INFO [monitor.py:20] torch.compile took 12.50 s in total
(EngineCore pid=2) INFO [core.py:402] init engine (profile, create kv cache, warmup model) took 3.53 s
"""


def test_effective_settings_are_read_from_the_log() -> None:
    assert vllm_log.settings_from_log(LOG) == {
        "max_num_seqs": 8,
        "max_num_scheduled_tokens": 2048,
        "max_model_len": 2048,
        "tensor_parallel": 1,
        "device": "cpu",
        "dtype": "float32",
        "quantization": "None",
        "kv_cache_dtype": "auto",
        "prefix_caching": True,
        "chunked_prefill": False,
        "enforce_eager": True,
        "kv_cache_tokens": 11648,
        "max_concurrency": 5.69,
        "load_s": 2.32,
        "compile_s": 12.5,
        "init_engine_s": 3.53,
        "speculative": {"method": "draft_model", "model": "/models/d", "k": 3},
        "cuda_graph_sizes": [1, 2, 4],
    }


def test_kv_cache_settings_are_read_from_the_metrics_page() -> None:
    labels = 'block_size="128",cache_dtype="auto",enable_prefix_caching="True",num_gpu_blocks="91"'
    page = "x 1\nvllm:cache_config_info{" + labels + "} 1.0\n"
    expected = {"kv_cache_tokens": 91 * 128, "kv_cache_dtype": "auto", "prefix_caching": True}
    assert vllm_log.settings_from_metrics(page) == expected
    with_size = page.replace("{", '{kv_cache_size_tokens="11648",')
    assert vllm_log.settings_from_metrics(with_size)["kv_cache_tokens"] == 11648
    assert vllm_log.settings_from_metrics("nothing") == {}


def test_a_setting_that_differs_from_what_was_asked_is_a_warning() -> None:
    resolved = vllm_log.settings_from_log(LOG)
    same = config("draft_model", 3, draft="/models/d", max_num_seqs=8, chunked_prefill=False)
    assert vllm_log.differences(resolved, same) == ()
    other = config("draft_model", 5, draft="/models/d", max_num_seqs=16, chunked_prefill=True)
    assert vllm_log.differences(resolved, other) == (
        "asked for max_num_seqs 16, vLLM runs with 8",
        "asked for chunked_prefill True, vLLM runs with False",
        "asked for K 5, vLLM runs with 3",
    )
    assert "asked for off, vLLM speculates with draft_model" in vllm_log.differences(resolved, same.off())


def test_a_cpu_that_cannot_verify_sampled_drafts_is_a_warning() -> None:
    speculating = config("draft_model", 3, draft="/models/d")
    on_cpu = {"device": "cpu"}
    (warning,) = vllm.misjudges_sampled("0.32.0", on_cpu, speculating)
    assert "right for greedy traffic only" in warning
    assert vllm.misjudges_sampled("0.32.0", on_cpu, speculating.off()) == ()
    assert vllm.misjudges_sampled("0.32.0", {"device": "cuda"}, speculating) == ()
    assert vllm.misjudges_sampled("0.33.0", on_cpu, speculating) == ()


def test_a_server_that_does_not_speculate_although_asked_is_a_warning() -> None:
    resolved = vllm_log.settings_from_log("speculative_config=None, tokenizer='x'")
    assert vllm_log.differences(resolved, config("ngram", 4)) == ("asked for ngram K=4, vLLM runs without speculation",)


@pytest.mark.parametrize(("text", "parsed"), [("0.11.2.post2", (0, 11, 2)), ("0.33.0+cu130", (0, 33, 0)), ("", None)])
def test_versions_are_read(text: str, parsed: tuple[int, ...] | None) -> None:
    assert parse_version(text) == parsed
