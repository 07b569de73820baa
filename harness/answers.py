"""Single answers of a running server, outside any load: what the smoke test and the audits look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from backends.counters import parse_metrics
from backends.http_client import Reply, call
from backends.types import Endpoint, SpecCounters
from harness.client import ReplayOptions, call_of
from workloads.types import Request

MAX_TOKENS = 32
TIMEOUT_S = 120.0
NEAR_TIE_NATS = 0.25  # two steps of bfloat16 at logits of 16 to 32: below this, the batch's shape decides which token wins
LOOPING_SHARE = 0.8
_NGRAM = 4
_LOOP_MIN_TOKENS = 16


class NoAnswer(Exception):
    """Why there is no answer, in one line."""


@dataclass(frozen=True, slots=True)
class Output:
    """Answer to one request. `gaps[i]`: log-probability of token i minus that of the runner-up; empty where not told."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    gaps: tuple[float, ...] = ()

    @property
    def repetition(self) -> float:
        """Share of 4-grams that occurred before in the same answer; 0 for a short one."""
        grams = [self.token_ids[i : i + _NGRAM] for i in range(len(self.token_ids) - _NGRAM + 1)]
        if len(self.token_ids) < _LOOP_MIN_TOKENS:
            return 0.0
        return 1 - len(set(grams)) / len(grams)


def ask(
    endpoint: Endpoint, request: Request, *, gaps: bool = False, max_tokens: int = MAX_TOKENS, seed: int | None = None
) -> Output:
    """One answer: greedy, or, with `seed`, sampled as the request itself asks.

    `gaps` asks for log-probabilities too, where the engine has them.

    Raises:
        NoAnswer: no answer, an error, or a body that is no completion.
    """
    if seed is None:
        sampling = {k: v for k, v in request.sampling.items() if k in ("stop", "tools", "tool_choice")}
        request = replace(request, sampling={**sampling, "temperature": 0})
    prepared = call_of(request, endpoint, ReplayOptions(seed=seed)).shortened(max_tokens)
    fields = {key: value for key, value in prepared.fields.items() if key not in ("stream", "stream_options")}
    fields["return_token_ids"] = True
    chat = prepared.path.endswith("/chat/completions")
    probabilities: dict[str, Any] = ({"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}) if gaps else {}
    reply = _post(endpoint, prepared.path, {**fields, **probabilities})
    if reply is not None and reply.status == 400 and probabilities:  # an engine without log-probabilities
        reply = _post(endpoint, prepared.path, fields)
    if reply is None:
        raise NoAnswer(f"request {request.index} got no answer within {TIMEOUT_S:.0f} s")
    body = reply.json()
    if reply.status != 200 or not isinstance(body, dict) or not body.get("choices"):
        raise NoAnswer(f"request {request.index} got HTTP {reply.status}: {' '.join(reply.body[:200].split())}")
    return _output(body["choices"][0])


def _post(endpoint: Endpoint, path: str, fields: Mapping[str, Any]) -> Reply | None:
    return call(endpoint.base_url + path, fields, timeout_s=TIMEOUT_S, api_key_env=endpoint.api_key_env)


def _output(choice: Mapping[str, Any]) -> Output:
    text = choice["message"].get("content") if "message" in choice else choice.get("text")
    return Output(text or "", tuple(choice.get("token_ids") or ()), choice.get("finish_reason"), _gaps(choice.get("logprobs")))


def _gaps(logprobs: Mapping[str, Any] | None) -> tuple[float, ...]:
    """Difference of the two best log-probabilities at each token, in the chat or the completions layout."""
    if not logprobs:
        return ()
    if logprobs.get("content"):
        tops = [[entry["logprob"] for entry in token.get("top_logprobs", [])] for token in logprobs["content"]]
    else:
        tops = [list((top or {}).values()) for top in logprobs.get("top_logprobs") or []]
    pairs = [sorted(top, reverse=True)[:2] for top in tops]
    return tuple(pair[0] - pair[1] if len(pair) == 2 else float("inf") for pair in pairs)


def ask_all(
    endpoint: Endpoint,
    requests: Sequence[Request],
    *,
    at_once: int,
    gaps: bool = False,
    max_tokens: int = MAX_TOKENS,
    seed: int | None = None,
) -> dict[int, Output]:
    """Answers by index of the request, `at_once` of them at a time: that is what shapes the engine's batches.

    Raises:
        NoAnswer: any of them was not answered.
    """
    with ThreadPoolExecutor(at_once) as pool:
        found = pool.map(lambda request: ask(endpoint, request, gaps=gaps, max_tokens=max_tokens, seed=seed), requests)
        return {request.index: output for request, output in zip(requests, found, strict=True)}


def counters(endpoint: Endpoint) -> SpecCounters | None:
    """What the server has counted so far; None where it publishes nothing that can be read."""
    page = call(f"{endpoint.base_url}/metrics", api_key_env=endpoint.api_key_env)
    if page is None or page.status != 200 or endpoint.backend == "unknown":
        return None
    return parse_metrics(endpoint.backend, page.body)[0]
