"""The smoke test of a configuration, against a small server whose answers each test chooses."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from backends.types import Endpoint, ServingConfig
from harness.answers import Output
from harness.smoke import SmokeResult, smoke_requests, smoke_test
from workloads.types import Request

SPEC = ServingConfig(backend="vllm", model="m", variant="ngram", k=4)
TEXT = (5, 6, 7, 8)


class FakeServer:
    """Counts like vLLM: `drafts` steps with `accepted` tokens for every request."""

    def __init__(self, answer: Callable[[dict[str, Any]], tuple[int, dict[str, Any]]], drafts: int, accepted: int) -> None:
        self.answer, self.drafts, self.accepted = answer, drafts, accepted
        self.bodies: list[dict[str, Any]] = []

    def page(self) -> str:
        count = len(self.bodies)
        return (
            "process_start_time_seconds 1\n"
            f"vllm:spec_decode_num_drafts_total {self.drafts * count}\n"
            f"vllm:spec_decode_num_draft_tokens_total {4 * self.drafts * count}\n"
            f"vllm:spec_decode_num_accepted_tokens_total {self.accepted * count}\n"
            f"vllm:inter_token_latency_seconds_count {9 * count}\n"
        )


@contextmanager
def serving(
    answer: Callable[[dict[str, Any]], tuple[int, dict[str, Any]]], *, drafts: int = 3, accepted: int = 2
) -> Iterator[tuple[Endpoint, FakeServer]]:
    fake = FakeServer(answer, drafts, accepted)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def reply(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.reply(200, fake.page().encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.bodies.append(body)
            status, answer = fake.answer(body)
            self.reply(status, json.dumps(answer).encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield Endpoint(f"http://127.0.0.1:{server.server_port}", "m", "vllm"), fake
    finally:
        server.shutdown()
        server.server_close()


def says(ids: tuple[int, ...] = TEXT, text: str = "fine", finish: str = "stop", logprobs: Any = None) -> Callable[..., Any]:
    choice = {"text": text, "message": {"content": text}, "token_ids": list(ids), "finish_reason": finish, "logprobs": logprobs}
    return lambda _: (200, {"choices": [choice]})


def request(index: int = 0, **fields: Any) -> Request:
    return Request(index=index, arrival_s=0.0, **{"prompt": "hello", **fields})


def run(answer: Callable[..., Any], config: ServingConfig = SPEC, *, of: Request | None = None, **options: Any) -> SmokeResult:
    baseline = options.pop("baseline", None)
    with serving(answer, **options) as (endpoint, _):
        return smoke_test(endpoint, config, [of or request()], baseline=baseline)


def test_a_sound_configuration_passes_and_keeps_its_outputs() -> None:
    result = run(says(), baseline={0: Output("fine", TEXT, "stop")})
    assert (result.failure, result.warnings) == (None, ())
    assert result.outputs[0].token_ids == TEXT


def test_the_longest_and_one_structured_request_are_chosen() -> None:
    requests = [
        request(0, prompt="short"),
        request(1, prompt="a much longer prompt than the other"),
        request(2, prompt="json please", response_format={"type": "json_object"}),
        request(3, prompt="more json", response_format={"type": "json_object"}),
    ]
    assert [r.index for r in smoke_requests(requests)] == [1, 2]
    assert [r.index for r in smoke_requests([request(0, input_tokens=9), request(1, input_tokens=90)])] == [1]
    assert smoke_requests([]) == ()


def test_requests_are_sent_greedily_and_only_off_is_asked_for_probabilities() -> None:
    sampled = request(sampling={"temperature": 0.7, "top_p": 0.9, "stop": ["x"]})
    with serving(says()) as (endpoint, fake):
        smoke_test(endpoint, SPEC, [sampled])
        on = fake.bodies[0]
        smoke_test(endpoint, SPEC.off(), [sampled])
    assert (on["temperature"], on["stop"], "top_p" in on, "logprobs" in on, "stream" in on) == (0, ["x"], False, False, False)
    assert fake.bodies[-1]["logprobs"] == 2


def test_speculation_that_is_not_active_fails() -> None:
    result = run(says(), drafts=0, accepted=0)
    assert result.failure == "smoke test: ngram K=4 was asked for, and nothing was drafted in 18 decode steps"


def test_drafts_that_are_never_accepted_are_a_warning() -> None:
    result = run(says(), accepted=0)
    assert (result.failure, result.warnings) == (None, ("none of 24 draft tokens was accepted",))


def test_an_error_of_the_longest_request_fails_with_the_servers_words() -> None:
    result = run(lambda _: (400, {"error": {"message": "context is 2048"}}))
    assert result.failure == 'smoke test: request 0 got HTTP 400: {"error": {"message": "context is 2048"}}'
    assert result.outputs == {}


def test_structured_output_that_is_no_json_fails_unless_it_was_cut_off() -> None:
    wants = request(response_format={"type": "json_object"})
    assert "got no JSON" in (run(says(text='{"a": 1'), of=wants).failure or "")
    assert run(says(text='{"a": 1', finish="length"), of=wants).failure is None
    assert run(says(text='{"a": 1}'), of=wants).failure is None


def test_a_divergence_where_off_was_sure_fails_and_a_near_tie_is_listed_apart() -> None:
    other = (5, 6, 9, 8)
    sure = Output("fine", TEXT, "stop", gaps=(3.0, 3.0, 2.5, 3.0))
    tie = Output("fine", TEXT, "stop", gaps=(3.0, 3.0, 0.0, 3.0))
    unknown = Output("fine", TEXT, "stop")
    failed = run(says(other), baseline={0: sure})
    assert failed.failure == "smoke test: greedy text differs from off's at token 2, where off preferred its token by 2.50 nats"
    assert run(says(other), baseline={0: tie}).warnings == ("request 0: greedy text differs from off's at token 2, a near-tie",)
    assert "log-probabilities are not known" in run(says(other), baseline={0: unknown}).warnings[0]


@pytest.mark.parametrize(
    "logprobs",
    [
        {"top_logprobs": [{"a": -0.5, "b": -0.75}, {"a": -0.1}]},
        {"content": [{"top_logprobs": [{"logprob": -0.5}, {"logprob": -0.75}]}, {"top_logprobs": [{"logprob": -0.1}]}]},
    ],
    ids=["completions", "chat"],
)
def test_gaps_are_read_from_both_layouts(logprobs: Any) -> None:
    assert run(says(logprobs=logprobs), SPEC.off()).outputs[0].gaps == (0.25, float("inf"))


def test_text_that_repeats_itself_fails_only_where_offs_does_not() -> None:
    looping, sound = tuple([1, 2, 3, 4] * 8), tuple(range(32))
    assert Output("", looping, None).repetition == pytest.approx(25 / 29)  # 29 4-grams, 4 of them distinct
    assert Output("", sound, None).repetition == 0
    failed = run(says(looping), baseline={0: Output("fine", looping[:15] + sound, "stop", gaps=(0.0,) * 47)})
    assert "repeats itself (86%, off" in (failed.failure or "")
    assert run(says(looping), baseline={0: Output("fine", looping, "stop")}).failure is None


def test_an_engine_without_log_probabilities_is_asked_again_without() -> None:
    def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        found = says()(body)
        return (400, {"error": "logprobs"}) if "logprobs" in body else found

    result = run(answer, SPEC.off())
    assert (result.failure, result.outputs[0].gaps) == (None, ())


def test_an_empty_answer_fails_unless_offs_is_empty_too() -> None:
    assert run(says((), "")).failure == "smoke test: request 0 got an empty answer"
    assert run(says((), ""), baseline={0: Output("", (), "stop")}).failure is None
