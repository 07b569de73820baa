"""The real-time server: its pages, its truth, and the adapter that starts it."""

from __future__ import annotations

import threading

import pytest
from simulated_server import serving

from backends.counters import parse_metrics
from backends.simulated import adapter, text
from backends.simulated.presets import PRESETS
from backends.types import Endpoint, ServingConfig, SpecCounters, WorkloadFacts

WORLD = PRESETS["small"]()
CONFIG = ServingConfig("simulated", "small", "draft_model", k=3, max_num_seqs=8)


@pytest.mark.parametrize(("dialect", "backend"), [("spectune", "simulated"), ("vllm", "vllm"), ("sglang", "sglang")])
def test_page_of_each_dialect_gives_the_counts_back(dialect: str, backend: str) -> None:
    with serving(WORLD, dialect=dialect, replicas=2) as server:
        threads = [threading.Thread(target=server.ask, kwargs={"max_tokens": 30}) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        truth = server.truth(4)
        page = server.http.get("/metrics").text
    counters, gauges = parse_metrics(backend, page)
    assert page.count("requests_running{") + page.count("num_running_reqs{") == 2  # one series for each engine
    assert (counters.generated_tokens, counters.first_tokens, counters.prompt_tokens) == (120, 4, 28)
    assert counters.decode_steps == sum(line["decode_steps"] for line in truth)
    assert counters.tau == pytest.approx((120 - 4) / sum(line["decode_steps"] for line in truth))
    assert (gauges.running, gauges.waiting) == (0.0, 0.0)
    if dialect != "sglang":
        accepted, positions = counters.accepted_tokens, counters.accepted_per_position
        assert positions is not None
        assert accepted == sum(positions)
        assert accepted >= sum(line["accepted_tokens"] for line in truth)  # an engine counts what it accepted past the end, too


def test_tensorrt_llm_page_is_json_beside_a_prometheus_page() -> None:
    with serving(WORLD, dialect="tensorrt_llm") as server:
        server.ask()
        json_page = server.http.get("/metrics").text
        page = server.engine.statistics_page()
    assert parse_metrics("tensorrt_llm", json_page)[0] == SpecCounters()
    assert parse_metrics("tensorrt_llm", json_page)[1].running == 0
    counters, _ = parse_metrics("tensorrt_llm", page)
    assert counters.generated_tokens == 8
    assert counters.tau_drafted is not None
    assert counters.tau_drafted > 1


def test_off_emits_one_token_a_step_and_greedy_text_does_not_depend_on_the_variant() -> None:
    answers = []
    for variant, k in (("off", 0), ("draft_model", 4)):
        with serving(WORLD, variant=variant, k=k) as server:
            answers.append(server.ask(max_tokens=20))
    plain, drafted = ([token for choice in answer.choices[1:] for token in choice["token_ids"]] for answer in answers)
    assert plain == drafted
    assert [len(choice["token_ids"]) for choice in answers[0].choices[1:]] == [1] * 20


def test_cancelled_request_is_dropped_and_logged() -> None:
    with serving(WORLD) as server:
        body = {"model": "simulated", "prompt": "a", "max_tokens": 5000, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_raw())
        (truth,) = server.truth(1)
        assert truth["ended"] == "cancelled"
        _, gauges = parse_metrics("simulated", server.http.get("/metrics").text)
        assert gauges.running == 0


def test_category_reaches_the_acceptance_model() -> None:
    with serving(WORLD) as server:
        for _ in range(3):
            server.ask(max_tokens=200, metadata={"category": "code"})
            server.ask(max_tokens=200, metadata={"category": "chat"})
        truth = server.truth(6)
    steps = [sum(line["decode_steps"] for line in truth[start::2]) for start in (0, 1)]
    assert steps[0] < 0.7 * steps[1]


def test_request_longer_than_the_cache_is_refused() -> None:
    with serving(WORLD) as server:
        assert server.ask(max_tokens=20_000).status == 400


def test_tokens_of_a_whole_output_are_its_tokens() -> None:
    ids = text.output_ids([1, 2, 3], 0, 50)
    assert tuple(text.encode(text.decode(ids))) == ids
    wide = text.output_ids([1, 2, 3], 0, 50, lead=2)
    assert tuple(text.encode(text.decode(wide))) == wide


def test_launch_is_a_command_line_for_the_world() -> None:
    launch = adapter.launch(CONFIG, port=81, command=("python",), base_args=("--seed", "4"))
    assert " ".join(launch.argv) == (
        "python -m backends.simulated --world small --model simulated --port 81 --variant draft_model --k 3 "
        "--max-num-seqs 8 --seed 4"
    )


@pytest.mark.parametrize(
    ("config", "facts", "reason"),
    [
        (CONFIG, WorkloadFacts(), None),
        (ServingConfig("simulated", "small", "eagle3", k=3), WorkloadFacts(), "no variant 'eagle3'"),
        (ServingConfig("simulated", "small", "draft_model", k=9), WorkloadFacts(), "K = 1..4, not 9"),
        (ServingConfig("simulated", "nowhere"), WorkloadFacts(), "no world 'nowhere'"),
        (ServingConfig("simulated", "small", weight_quantization="fp8"), WorkloadFacts(), "one precision"),
        (CONFIG, WorkloadFacts(max_input_tokens=17_000), "needs 17000 tokens"),
        (CONFIG, WorkloadFacts(sampling_parameters=frozenset({"min_p"})), "use min_p"),
    ],
)
def test_adapter_says_what_a_world_cannot_run(config: ServingConfig, facts: WorkloadFacts, reason: str | None) -> None:
    got = adapter.supports(config, facts)
    assert got is None if reason is None else reason in str(got)


def test_settings_are_read_from_the_log() -> None:
    line = 'x\nsimulated engine: {"world": "small", "variant": "off", "k": 0, "max_num_seqs": 8, "kv_capacity_tokens": 5}\ny'
    endpoint = adapter.read_back(Endpoint("http://x", "simulated", "simulated"), CONFIG, line)
    assert (endpoint.version, endpoint.kv_cache_tokens) == ("small", 5)
    assert endpoint.warnings == ("asked for variant=draft_model, runs off", "asked for k=3, runs 0")
