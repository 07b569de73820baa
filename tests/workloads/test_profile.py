"""Profiles: known answers, and what people are shown of them."""

import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.workloads.traces import trace_of
from workloads.load import load_trace
from workloads.profile import TEXT_BLOCK_CHARS, Profile, profile
from workloads.render import profile_svg, render_profile

DATA = Path(__file__).parent.parent / "data" / "traces"


def shown(found: Profile) -> str:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in render_profile(found):
        console.print(part)
    return console.export_text()


def test_a_poisson_stream_has_dispersion_one_and_no_grid() -> None:
    arrivals = np.cumsum(np.random.default_rng(0).exponential(0.1, 20_000))
    found = profile(trace_of(arrival_s=(arrivals - arrivals[0]).tolist())).arrivals
    assert found["mean_rps"] == pytest.approx(10, rel=0.02)
    assert found["dispersion"] == pytest.approx(1, abs=0.1)
    assert found["quantum_s"] is None


def test_mooncake_arrives_on_a_grid_of_three_seconds_and_is_warned_of() -> None:
    found = profile(load_trace(DATA / "mooncake_conversation.head3000.jsonl.gz"))
    assert found.arrivals["quantum_s"] == pytest.approx(3.0, abs=0.01)
    assert any("--jitter 3" in warning for warning in found.warnings)
    assert found.prefix_sharing["share"] > 0.1
    text = shown(found)
    assert "3,000" in text or "3000 read, 3000 kept" in text
    assert "arrival grid" in text


def test_concurrency_by_littles_law() -> None:
    trace = trace_of(arrival_s=[0.0, 1.0, 2.0, 3.0])
    found = profile(trace, service_time_s=2.0).concurrency
    assert found == {"service_time_s": 2.0, "service_time_from": "given", "mean": 8 / 5, "max": 2}
    assert profile(trace).concurrency["mean"] is None
    recorded = trace_of(arrival_s=[0.0, 1.0, 1.5], source_latency_s=[4.0, 1.0, None])
    assert profile(recorded).concurrency == {"service_time_s": 2.5, "service_time_from": "recorded", "mean": 1.25, "max": 2}


def test_prefix_sharing_is_the_share_that_a_cache_without_limit_holds() -> None:
    found = profile(trace_of(prefix_blocks=[[1, 2, 3], [1, 2, 4], [5, 2, 3], [1, 2, 3, 6]])).prefix_sharing
    assert found["share"] == 5 / 13  # two blocks of the second row, three of the fourth: a prefix ends at the first new block
    assert found["requests"] == 0.5
    beginning = "a" * TEXT_BLOCK_CHARS
    texts = profile(trace_of(prompt=[beginning + "b" * TEXT_BLOCK_CHARS, beginning + "c" * TEXT_BLOCK_CHARS])).prefix_sharing
    assert (texts["share"], texts["counted_in"]) == (0.25, "256 characters")
    assert profile(trace_of(input_tokens=[1])).prefix_sharing["share"] is None


def test_sampling_and_what_engines_refuse_with_speculation() -> None:
    sampling = [{"temperature": 0}, {"temperature": 0.3, "min_p": 0.1}, {"temperature": 1.5}, None]
    columns: dict[str, list[Any]] = {
        "prompt": ["x"] * 4,
        "sampling": [None if s is None else str(s).replace("'", '"') for s in sampling],
        "response_format": ['{"type": "json_object"}', None, None, None],
        "session_id": ["a", "a", "a", "b"],
    }
    found = profile(trace_of(**columns))
    assert found.requests["temperature"] == {"greedy": 0.25, "up to 0.5": 0.25, "above 1": 0.25, "not recorded": 0.25}
    assert found.requests["refused_with_speculation"] == {"min_p": 1}
    assert found.requests["structured_output"] == 0.25
    assert found.sessions == {"count": 2, "requests_per_session": 2.0, "longest": 3, "tenants": 0}
    assert any(warning.startswith("1 requests use min_p") for warning in found.warnings)
    assert "greedy 25%" in shown(found)


def test_requests_beyond_the_context_are_counted() -> None:
    trace = trace_of(input_tokens=[10, 90, 101], output_tokens=[5, 20, 1])
    warnings = profile(trace, context_tokens=100).warnings
    assert "2 requests are longer than the model's context of 100 tokens" in warnings
    assert profile(trace).lengths["input_tokens"] == {"p50": 90.0, "p95": pytest.approx(99.9), "max": 101.0}


def test_acceptance_is_shown_by_k_and_category() -> None:
    part = {"variant": "ngram", "min_n": 2, "max_n": 4, "category": "code", "context_from": 0, "context_to": None}
    parts = [{**part, "k": 1, "tau": 1.25}, {**part, "k": 4, "tau": 1.875}]
    text = shown(profile(trace_of(prompt=["x"]), acceptance=parts))
    assert "K=1" in text
    assert "K=4" in text
    assert "1.875" in text
    assert "ngram n 2-4" in text


def test_a_trace_of_one_moment_has_no_rate() -> None:
    found = profile(trace_of(arrival_s=[0.0, 0.0]))
    assert (found.arrivals["span_s"], found.arrivals["mean_rps"]) == (0.0, None)
    assert "unknown" in shown(found)


def test_the_drawing_is_one_svg_equal_at_every_run() -> None:
    trace = load_trace(DATA / "BurstGPT_1.head400.csv")
    drawing = profile_svg(trace)
    assert drawing == profile_svg(trace)
    root = ET.fromstring(drawing)
    assert root.tag.endswith("svg")
    words = "".join(root.itertext())
    assert "Arrivals" in words
    assert "input tokens" in words
    assert profile_svg(trace_of(prompt=["no lengths, no times"])).count("<svg") == 1


def test_a_profile_is_plain_data() -> None:
    found = profile(load_trace(DATA / "BurstGPT_1.head400.csv")).to_dict()
    assert found["summary"]["dropped"] == {"failed_upstream": 17}
    assert not any(isinstance(v, float) and math.isnan(v) for v in found["arrivals"].values())
