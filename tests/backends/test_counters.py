"""Pages of every engine against counts read by eye."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.counters import parse_metrics
from backends.types import ConfigError, Gauges, SpecCounters

PAGES = Path(__file__).parents[1] / "data" / "metrics"


def vllm_page(name: str) -> SpecCounters:
    return parse_metrics("vllm", (PAGES / name).read_text())[0]


def test_vllm_counts_are_summed_over_engines_and_created_twins_are_no_counts() -> None:
    before, after = vllm_page("metrics_vllm_v1_before.txt"), vllm_page("metrics_vllm_v1_after_2engines.txt")
    assert (before.drafted_steps, before.draft_tokens, before.accepted_tokens) == (100, 300, 150)
    assert before.accepted_per_position == (80, 45, 25)
    assert (after.drafted_steps, after.draft_tokens, after.accepted_tokens) == (2100, 6300, 3650)
    window = after - before
    assert window.tau_drafted == 1 + 3500 / 2000
    assert window.accepted_per_position is None  # the second page lacks it: unknown, not 0
    assert window.generated_tokens is None
    assert before.process_start_s == 1.7567367e9


def test_vllm_decode_steps_are_the_inter_token_observations() -> None:
    # 6 requests, 390 tokens, 290 decode steps of which only 38 drafted: what n-gram drafting really gives.
    page = """
vllm:generation_tokens_total{engine="0",model_name="m"} 390.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 6.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf",model_name="m"} 290.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 290.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 9.1
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 38.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 190.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 97.0
vllm:prefix_cache_queries_total{engine="0"} 500.0
vllm:prefix_cache_hits_total{engine="0"} 128.0
vllm:num_preemptions_total{engine="0"} 2.0
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 2.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:kv_cache_usage_perc{engine="1"} 0.25
"""
    counters, gauges = parse_metrics("vllm", page)
    assert counters.tau == pytest.approx((390 - 6) / 290)
    assert counters.tau_drafted == pytest.approx(1 + 97 / 38)
    assert (counters.prefix_hit_tokens, counters.prefix_query_tokens, counters.preemptions) == (128, 500, 2)
    assert gauges == Gauges(running=5.0, waiting=0.0, kv_use=0.375)


def test_server_without_speculation_has_no_draft_counts() -> None:
    counters, _ = parse_metrics("vllm", 'vllm:generation_tokens_total{engine="0"} 5\n')
    assert counters == SpecCounters(generated_tokens=5)


def test_sglang_gauges_of_the_last_window_are_not_acceptance() -> None:
    assert parse_metrics("sglang", (PAGES / "metrics_sglang.txt").read_text()) == (SpecCounters(), Gauges())


def test_sglang_verification_calls_are_decode_steps() -> None:
    page = """
sglang:spec_verify_calls_total{engine_type="unified",model_name="m"} 100.0
sglang:spec_accept_length{engine_type="unified",model_name="m",tp_rank="0"} 9.9
sglang:generation_tokens_total{engine_type="unified",model_name="m"} 270.0
sglang:prompt_tokens_total{engine_type="unified",model_name="m"} 80.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 16.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 4.0
sglang:time_to_first_token_seconds_count{engine_type="unified",model_name="m"} 20.0
sglang:num_retracted_requests_total{model_name="m"} 1.0
sglang:num_running_reqs{dp_rank="0"} 2.0
sglang:num_running_reqs{dp_rank="1"} 3.0
sglang:num_queue_reqs{dp_rank="0"} 1.0
sglang:token_usage{dp_rank="0"} 0.02
process_start_time_seconds 1.7e9
"""
    counters, gauges = parse_metrics("sglang", page)
    assert counters.tau == 2.5
    assert (counters.drafted_steps, counters.accepted_tokens) == (100, None)
    assert (counters.prefix_hit_tokens, counters.preemptions, counters.process_start_s) == (20, 1, 1.7e9)
    assert gauges == Gauges(running=5.0, waiting=1.0, kv_use=0.02)


@pytest.mark.parametrize("base", [0, 1])
def test_tensorrt_llm_steps_are_the_drafts_of_the_first_position(base: int) -> None:
    drafted = [(10, base), (10, base + 1), (4, base + 2)]
    accepted = [(7, base), (5, base + 1), (1, base + 2)]
    page = "".join(f'trtllm_spec_decode_drafted_tokens_total{{token_position="{p}"}} {n}.0\n' for n, p in reversed(drafted))
    page += "".join(f'trtllm_spec_decode_accepted_tokens_total{{token_position="{p}"}} {n}.0\n' for n, p in accepted)
    page += "trtllm_spec_decode_num_accepted_tokens_total 999.0\ntrtllm_generation_tokens_total 30.0\n"
    page += (
        "trtllm_kv_cache_reused_blocks_total 3\ntrtllm_kv_cache_missed_blocks_total 1\ntrtllm_kv_cache_tokens_per_block 32\n"
    )
    page += "trtllm_num_requests_running 4\ntrtllm_kv_cache_utilization 0.25\n"
    counters, gauges = parse_metrics("tensorrt_llm", page)
    assert counters.tau_drafted == 1 + 13 / 10
    assert counters.accepted_per_position == (7, 5, 1)
    assert counters.draft_tokens == 24
    assert counters.decode_steps is None
    assert (counters.prefix_hit_tokens, counters.prefix_query_tokens) == (96, 128)
    assert gauges == Gauges(running=4.0, waiting=None, kv_use=0.25)


def test_tensorrt_llm_iteration_page_gives_the_last_gauges_and_no_counts() -> None:
    page = '[{"numActiveRequests": 9}, {"numActiveRequests": 2, "kvCacheStats": {"usedNumBlocks": 5, "maxNumBlocks": 20}}]'
    assert parse_metrics("tensorrt_llm", page) == (SpecCounters(), Gauges(running=2, waiting=None, kv_use=0.25))
    assert parse_metrics("tensorrt_llm", "[]") == (SpecCounters(), Gauges())
    assert parse_metrics("tensorrt_llm", '[{"numActive') == (SpecCounters(), Gauges())


REFERENCE = """# HELP spectune:decode_steps_total Decode steps
# TYPE spectune:decode_steps_total counter
spectune:decode_steps_total 40
spectune:drafted_steps_total 30
spectune:draft_tokens_total 90
spectune:accepted_tokens_total 45
spectune:accepted_tokens_per_position_total{position="0"} 25
spectune:accepted_tokens_per_position_total{position="1"} 15
spectune:accepted_tokens_per_position_total{position="2"} 5
spectune:generated_tokens_total 89
spectune:first_tokens_total 4
spectune:prompt_tokens_total 1200
spectune:preemptions_total 0
spectune:engine_steps_total 20
spectune:requests_running 3
spectune:requests_waiting 1
spectune:kv_capacity_tokens 8192
spectune:kv_use_ratio 0.5
process_start_time_seconds 1764430000.5
"""


@pytest.mark.parametrize("backend", ["reference", "simulated"])
def test_own_page(backend: str) -> None:
    counters, gauges = parse_metrics(backend, REFERENCE)
    assert counters.tau == (89 - 4) / 40
    assert counters.tau_drafted == 1 + 45 / 30
    assert counters.accepted_per_position == (25, 15, 5)
    assert (counters.preemptions, counters.engine_steps, counters.process_start_s) == (0, 20, 1764430000.5)
    assert gauges == Gauges(running=3, waiting=1, kv_use=0.5)


def test_label_order_exemplars_time_stamps_crlf_and_missing_types_do_not_matter() -> None:
    page = (
        'vllm:spec_decode_num_drafts_total{model_name="a,b}\\"c",engine="1"} 2e1 # {trace_id="x y"} 1.0 123.4\r\n'
        'vllm:spec_decode_num_drafts_total{engine="0", model_name="m",} 1.0 1700000000000\r\n'
        "# TYPE broken\r\n"
        "vllm:generation_tokens_total 7\r\n"
        "some_other_metric{ 3\r\n"
        "# EOF"
    )
    counters, _ = parse_metrics("vllm", page)
    assert (counters.drafted_steps, counters.generated_tokens) == (21, 7)


@pytest.mark.parametrize("bad", ['{engine="1"} NaN', '{engine="1"} +Inf', '{engine="1"', '{engine="1"} x', ""])
def test_unreadable_part_makes_the_sum_unknown_and_leaves_the_rest(bad: str) -> None:
    name = "vllm:spec_decode_num_drafts_total"
    counters, _ = parse_metrics("vllm", f'{name}{{engine="0"}} 5\nvllm:generation_tokens_total 7\n{name}{bad}')
    assert (counters.drafted_steps, counters.generated_tokens) == (None, 7)


def test_positions_end_at_the_first_gap() -> None:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    page = f'{name}{{position="2",engine="0"}} 1\n{name}{{position="0",engine="0"}} 9\n{name}{{position="0",engine="1"}} 4\n'
    assert parse_metrics("vllm", page)[0].accepted_per_position == (13,)


def test_restart_is_seen_in_the_start_time() -> None:
    earlier, _ = parse_metrics("vllm", "vllm:generation_tokens_total 7\nvllm:generation_tokens_created 100\n")
    later, _ = parse_metrics("vllm", "vllm:generation_tokens_total 9\nvllm:generation_tokens_created 200\n")
    with pytest.raises(ValueError, match="restarted"):
        _ = later - earlier


def test_unknown_dialect_is_named() -> None:
    with pytest.raises(ConfigError, match="no statistics dialect for backend 'tgi'"):
        parse_metrics("tgi", "")


@given(
    st.text(max_size=200) | st.sampled_from(["[1]", "[null]", "[[]]", "vllm:{", "sglang:x{"]),
    st.sampled_from(["vllm", "sglang", "tensorrt_llm", "reference"]),
)
def test_any_page_can_be_read(page: str, backend: str) -> None:
    counters, _ = parse_metrics(backend, page)
    assert counters.drafted_steps is None
