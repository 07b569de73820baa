"""SGLang's command line for each variant and version, its rules, and what is read back from the server. Nothing is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import sglang
from backends import sglang_server_info as server_info
from backends.http_client import Reply
from backends.types import ConfigError, Endpoint, Launch, ServingConfig, WorkloadFacts
from tests.backends.sglang_space import arguments, rewritten

FACTS = WorkloadFacts()
RECORD = Path(__file__).parents[1] / "data" / "sglang" / "resolved.jsonl"
NEWEST = sglang.ASSUMED_VERSION


def config(variant: str = "off", k: int = 0, **changes: Any) -> ServingConfig:
    return ServingConfig(**{"backend": "sglang", "model": "org/target", "variant": variant, "k": k, **changes})


def start(settings: ServingConfig, *base: str) -> Launch:
    return sglang.launch(settings, port=8123, command=("sglang", "serve"), base_args=base)


def flags(settings: ServingConfig, version: tuple[int, ...] = NEWEST, device: str = "cuda") -> dict[str, Any]:
    return {k.removeprefix("speculative-"): v for k, v in sglang.speculative_flags(settings, version, device).items()}


def test_off_states_every_setting_that_a_measurement_depends_on() -> None:
    settings = config(
        max_num_seqs=32, weight_quantization="fp8", kv_cache_dtype="fp8", chunked_prefill=False, prefix_caching=False
    )
    assert " ".join(start(settings).argv) == (
        "sglang serve --model-path org/target --host 127.0.0.1 --port 8123 --served-model-name model --enable-metrics"
        " --tensor-parallel-size 1 --max-running-requests 32 --chunked-prefill-size -1 --disable-radix-cache"
        " --kv-cache-dtype fp8_e4m3 --quantization fp8"
    )


def test_an_interpreter_is_given_the_module() -> None:
    launch = sglang.launch(config(), port=1, command=("/opt/sglang/bin/python",), base_args=())
    assert launch.argv[:4] == ("/opt/sglang/bin/python", "-m", "sglang.launch_server", "--model-path")


def test_off_and_on_differ_by_speculation_alone() -> None:
    on = config("eagle3", 3, draft="org/head", max_num_seqs=200)
    off_argv, on_argv = start(on.off()).argv, start(on).argv
    assert on_argv[: len(off_argv)] == off_argv
    assert all(part.startswith("--speculative-") for part in on_argv[len(off_argv) :] if part.startswith("--"))
    assert "--max-running-requests 200" in " ".join(off_argv)  # the engine would lower it to 48 for the second alone


@pytest.mark.parametrize(
    ("settings", "algorithm", "steps", "topk", "tokens", "others"),
    [
        (config("ngram", 5), "NGRAM", 5, 1, 6, {"ngram-max-bfs-breadth": 1}),
        (config("ngram", 5, topk=4), "NGRAM", 5, 4, 6, {"ngram-max-bfs-breadth": 4}),
        (config("draft_model", 4, draft="d"), "STANDALONE", 4, 1, 5, {"draft-model-path": "d"}),
        (config("eagle2", 3, draft="d"), "EAGLE", 3, 1, 4, {"draft-model-path": "d"}),
        (config("eagle3", 5, draft="d", topk=4, num_draft_tokens=8), "EAGLE3", 5, 4, 8, {"draft-model-path": "d"}),
        (config("mtp", 3), "EAGLE", 3, 1, 4, {"draft-model-path": "org/target"}),
        (config("dflash", 15, draft="d"), "DFLASH", 1, 1, 16, {"draft-model-path": "d"}),
        (config("dspark", 7, draft="d"), "DSPARK", 1, 1, 8, {"draft-model-path": "d", "dspark-block-size": 7}),
    ],
)
def test_steps_width_and_verified_tokens_are_always_given_together(
    settings: ServingConfig, algorithm: str, steps: int, topk: int, tokens: int, others: dict[str, Any]
) -> None:
    assert sglang.supports(settings, FACTS) is None
    quantization = {} if settings.variant == "ngram" else {"draft-model-quantization": "unquant"}
    expected = {"algorithm": algorithm, "num-steps": steps, "eagle-topk": topk, "num-draft-tokens": tokens}
    assert flags(settings) == {**expected, **others, **quantization}


def test_a_draft_says_its_own_quantization_because_an_unset_one_inherits_the_targets() -> None:
    settings = config("draft_model", 4, draft="d", weight_quantization="fp8")
    assert flags(settings)["draft-model-quantization"] == "unquant"
    assert flags(config("draft_model", 4, draft="d", draft_quantization="fp8"))["draft-model-quantization"] == "fp8"


def test_before_0_5_7_a_draft_is_quantized_like_its_target() -> None:
    old = (0, 5, 6)
    assert "draft-model-quantization" not in flags(config("draft_model", 4, draft="d"), old)
    with pytest.raises(ConfigError, match=r"SGLang 0.5.6 quantizes a draft like its target \(fp8\)"):
        flags(config("draft_model", 4, draft="d", weight_quantization="fp8"), old)


@pytest.mark.parametrize(
    ("variant", "too_old", "since"),
    [
        ("ngram", (0, 5, 2), "0.5.3"),
        ("draft_model", (0, 5, 1), "0.5.2"),
        ("eagle3", (0, 4, 4), "0.4.5"),
        ("dspark", (0, 5, 15), "0.5.16"),
    ],
)
def test_a_version_without_the_algorithm_is_named(variant: str, too_old: tuple[int, ...], since: str) -> None:
    with pytest.raises(ConfigError, match=f"variant '{variant}' needs SGLang {since}, this is"):
        flags(config(variant, 4, draft=None if variant == "ngram" else "d"), too_old)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (config("medusa", 3, draft="d"), "SGLang has no variant 'medusa'"),
        (config("suffix", 3), "SGLang has no variant 'suffix'"),
        (config("eagle3", 3), "needs a draft checkpoint"),
        (config("eagle3", 3, draft="d", num_draft_tokens=9), "with topk 1 SGLang verifies K + 1 = 4 tokens, not 9"),
        (config("eagle3", 3, draft="d", topk=4), "give --tree-nodes"),
        (config("eagle3", 3, draft="d", topk=4, num_draft_tokens=3), "has 4 to 37 nodes to verify, not 3"),
        (config("eagle3", 3, draft="d", topk=4, num_draft_tokens=38), "has 4 to 37 nodes to verify, not 38"),
        (config("dflash", 7, draft="d", topk=2, num_draft_tokens=8), "topk must be 1"),
        (config("ngram", 3, topk=4, num_draft_tokens=8), "verifies K + 1 = 4 tokens, not 8"),
        (config("ngram", 18), "K must be below"),
        (config(weight_quantization="int4"), "no weight quantization 'int4'"),
        (config(kv_cache_dtype="fp7"), "no KV-cache type 'fp7'"),
        (config("ngram", 3, extra={"adaptive": True}), "for EAGLE and MTP chains only"),
        (config("eagle3", 4, draft="d", extra={"adaptive": True}), "K = 4 is not among the values that the schedule may take"),
        (config("eagle3", 4, draft="d", extra={"k_schedule": [[2, 8, 4]]}), "ranges start at batch size 1"),
        (config(extra={"trust_remote_code": True}), "remote code of a checkpoint is never run"),
    ],
)
def test_what_the_engine_would_rewrite_or_fail_on_is_refused_with_its_rule(settings: ServingConfig, reason: str) -> None:
    assert reason in (sglang.supports(settings, FACTS) or "")


@given(k=st.integers(1, 10), topk=st.integers(2, 8), nodes=st.integers(2, 700))
def test_a_tree_has_no_more_nodes_than_its_drafter_proposes(k: int, topk: int, nodes: int) -> None:
    # The drafter proposes topk candidates in its first step and topk for each of topk survivors in every later one.
    proposed = topk + (k - 1) * topk * topk
    settings = config("eagle3", k, draft="d", topk=topk, num_draft_tokens=nodes)
    assert (sglang.supports(settings, FACTS) is None) == (k + 1 <= nodes <= proposed + 1)


def test_min_p_is_refused_with_speculation_and_allowed_without() -> None:
    facts = WorkloadFacts(sampling_parameters=frozenset({"min_p", "temperature"}))
    assert "ignores min_p" in (sglang.supports(config("ngram", 3), facts) or "")
    assert sglang.supports(config(), facts) is None


def test_adaptive_speculation_exports_the_schedule_it_runs_with() -> None:
    launch = start(config("eagle3", 3, draft="d", extra={"adaptive": True}))
    assert "--speculative-adaptive --speculative-adaptive-config {folder}/adaptive.json" in " ".join(launch.argv)
    exported = json.loads(launch.files["adaptive.json"])
    assert {batch: entry["candidate_steps"] for batch, entry in exported.items()} == {
        "1": [1, 3, 5, 7], "8": [0, 1, 3], "32": [0, 1], "64": [0],
    }  # fmt: skip


def test_a_k_schedule_is_an_adaptive_schedule_of_single_values() -> None:
    launch = start(config("eagle3", 5, draft="d", extra={"k_schedule": [[1, 8, 5], [9, 32, 2], [33, 256, 0]]}))
    assert json.loads(launch.files["adaptive.json"]) == {
        "1": {"candidate_steps": [5]}, "9": {"candidate_steps": [2]}, "33": {"candidate_steps": [0]},
    }  # fmt: skip


def test_k_by_batch_size_needs_a_version_that_has_it() -> None:
    with pytest.raises(ConfigError, match=r"K by batch size needs SGLang 0.5.11, this is 0.5.10"):
        flags(config("eagle3", 3, draft="d", extra={"adaptive": True}), (0, 5, 10))


def test_on_a_cpu_attention_can_verify_and_off_keeps_the_same_scheduler() -> None:
    for settings in (config(), config("ngram", 3)):
        launch = start(settings, "--device", "cpu")
        line = " ".join(launch.argv)
        assert "--prefill-attention-backend intel_amx --decode-attention-backend intel_amx --disable-overlap-schedule" in line
        assert launch.env == {"SGLANG_USE_CPU_ENGINE": "1"}
    with pytest.raises(ConfigError, match="variant 'dflash' needs a GPU in SGLang"):
        start(config("dflash", 7, draft="d"), "--device", "cpu")


def test_the_users_flags_are_kept_unless_the_candidate_sets_them() -> None:
    argv = start(
        config("eagle3", 3, draft="d", max_num_seqs=64, extra={"mem_fraction_static": 0.7}),
        "--tp", "2", "--mem-fraction-static", "0.9", "--context-length", "4096", "--speculative-num-steps", "9",
    ).argv  # fmt: skip
    line = " ".join(argv)
    assert "--context-length 4096" in line
    assert "--mem-fraction-static 0.7" in line
    assert "0.9" not in argv
    assert "9" not in argv
    assert line.count("tensor-parallel-size") == 1


def test_production_flags_become_defaults_of_every_candidate() -> None:
    base = ("--tp", "2", "--max-running-requests", "128", "--kv-cache-dtype", "fp8_e5m2", "--disable-radix-cache")
    assert sglang.base_settings((*base, "--chunked-prefill-size", "-1")) == {
        "tensor_parallel": 2, "max_num_seqs": 128, "kv_cache_dtype": "fp8_e5m2", "prefix_caching": False, "chunked_prefill": False,
    }  # fmt: skip


@pytest.mark.parametrize("flag", ["--api-key", "--trust-remote-code"])
def test_keys_and_remote_code_have_no_place_on_the_command_line(flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        start(config(), flag, "x")


def test_recorded_answers_of_the_real_parser_keep_what_is_asked() -> None:
    entries = [json.loads(line) for line in RECORD.read_text().splitlines()]
    assert len(entries) >= 200
    assert {entry["config"]["variant"] for entry in entries} == sglang.VARIANTS
    for entry in entries:
        settings = ServingConfig.from_dict(entry["config"])
        assert sglang.supports(settings, FACTS) is None
        argv = arguments(settings, entry["device"])
        if "--speculative-adaptive-config" in argv:  # a path, different in each run
            at = argv.index("--speculative-adaptive-config")
            del argv[at : at + 2]
        assert rewritten(argv, entry["resolved"]) == {}, settings.label()


def info(**changes: Any) -> dict[str, Any]:
    """Keys of a real /server_info (0.5.23, a CPU) that matter here."""
    state = {
        "max_running_requests": 4, "tp_size": 1, "quantization": None, "kv_cache_dtype": "auto", "chunked_prefill_size": 4096,
        "disable_radix_cache": False, "disable_overlap_schedule": True, "page_size": 1, "device": "cpu",
        "speculative_algorithm": "NGRAM", "speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4,
        "speculative_adaptive": False, **changes,
    }  # fmt: skip
    return {"version": "0.5.23", "max_total_num_tokens": 8192, "max_running_requests": 48, "internal_states": [state]}


def read_back(monkeypatch: pytest.MonkeyPatch, settings: ServingConfig, body: dict[str, Any]) -> Endpoint:
    monkeypatch.setattr(sglang, "call", lambda *_, **__: Reply(200, json.dumps(body)))
    return sglang.read_back(Endpoint("http://127.0.0.1:1", "model", "sglang"), settings, "")


def test_the_schedulers_own_settings_are_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = read_back(monkeypatch, config("ngram", 3, max_num_seqs=4), info())
    assert (endpoint.version, endpoint.kv_cache_tokens, endpoint.warnings) == ("0.5.23", 8192, ())
    assert endpoint.resolved["max_num_seqs"] == 4  # the scheduler's, not the 48 of the front end
    assert endpoint.resolved["overlap_schedule"] is False


def test_each_difference_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    body = info(max_running_requests=48, speculative_num_draft_tokens=12, disable_radix_cache=True)
    assert read_back(monkeypatch, config("ngram", 3, max_num_seqs=64), body).warnings == (
        "asked for max_num_seqs 64, SGLang runs with 48",
        "asked for prefix_caching True, SGLang runs with False",
        "asked for speculative_num_draft_tokens 4, SGLang runs with 12",
    )


def test_speculation_that_nobody_asked_for_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings = read_back(monkeypatch, config(max_num_seqs=4), info()).warnings
    assert warnings == ("asked for speculative_algorithm None, SGLang runs with NGRAM",)


def test_a_dropped_schedule_and_short_graphs_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config("eagle3", 3, draft="d", max_num_seqs=64, extra={"adaptive": True})
    body = info(
        speculative_algorithm="EAGLE3", max_running_requests=64, device="cuda", cuda_graph_config={"decode": {"max_bs": 32}}
    )
    first, second = read_back(monkeypatch, settings, body).warnings
    assert "dropped the K schedule" in first
    assert "CUDA graphs end at batch size 32, up to 64 requests" in second


def test_forced_acceptance_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config("ngram", 3, max_num_seqs=4, extra={"env": {"SGLANG_SIMULATE_ACC_LEN": "2.5"}})
    assert "acceptance is forced to 2.5 tokens a step" in read_back(monkeypatch, settings, info()).warnings[0]


def test_a_server_without_settings_page_is_unverified_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "call", lambda *_, **__: None)
    endpoint = sglang.read_back(Endpoint("http://127.0.0.1:1", "model", "sglang"), config(), "")
    assert endpoint.kv_cache_tokens is None
    assert "settings unverified" in endpoint.warnings[0]


@pytest.mark.parametrize(
    ("accepted", "proposed", "histogram"),
    [
        ("spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram"),  # 0.5.23
        ("spec_accepted_drafts", "spec_proposed_drafts", "spec_accept_histogram"),  # 0.5.18
    ],
)
def test_counts_of_a_request_under_both_spellings(accepted: str, proposed: str, histogram: str) -> None:
    # 10 tokens in 4 verification steps after the first token: steps that accepted 0, 1, 2, 2 drafts of 3.
    meta = {"completion_tokens": 10, "spec_verify_ct": 4, accepted: 5, proposed: 12, histogram: [1, 1, 2, 0]}
    counts = server_info.request_counts(meta)
    assert counts.tau == (10 - 1) / 4 == 1 + 5 / 4
    assert counts.accepted_per_position == (3, 2, 0)
    assert (counts.accepted_tokens, counts.draft_tokens) == (5, 12)


def test_a_request_without_speculation_has_unknown_steps_not_zero() -> None:
    counts = server_info.request_counts({"completion_tokens": 10, "spec_verify_ct": 0})
    assert counts.decode_steps is None
    assert counts.tau is None
