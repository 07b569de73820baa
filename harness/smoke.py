"""One look at a configuration before any load: does it answer the workload's hardest requests, does it draft, is its text sound?

A configuration that fails here is FAIL with the reason, and nothing is measured on it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backends.types import Endpoint, ServingConfig, SpecCounters
from harness.answers import LOOPING_SHARE, MAX_TOKENS, NEAR_TIE_NATS, NoAnswer, Output, ask, counters
from workloads.types import Request

_ECHO = "one two three four five six seven eight nine ten. " * 4  # every drafter finds something to draft here


@dataclass(frozen=True, slots=True)
class SmokeResult:
    failure: str | None  # one line; None: go on and measure
    outputs: Mapping[int, Output]  # by index of the request; off's serve as `baseline` for every other configuration
    warnings: tuple[str, ...] = ()  # near-ties, counters that are not published


class _Failed(NoAnswer):
    """Why the smoke test failed, in one line."""


def smoke_requests(requests: Sequence[Request]) -> tuple[Request, ...]:
    """The longest request, and the first with structured output if there is one."""
    if not requests:
        return ()
    longest = max(requests, key=_length)
    structured = next((r for r in requests if r.response_format and r.index != longest.index), None)
    return (longest, structured) if structured else (longest,)


def smoke_test(
    endpoint: Endpoint, config: ServingConfig, requests: Sequence[Request], *, baseline: Mapping[int, Output] | None = None
) -> SmokeResult:
    """Send `requests` (those of `smoke_requests`) greedily, one at a time, and judge the answers.

    `baseline` holds the outputs of the smoke test of off: a divergence where off's two best tokens were nearly tied is a
    warning, any other a failure, since verification promises the target's own greedy text.
    """
    outputs: dict[int, Output] = {}
    warnings: list[str] = []
    try:
        before = counters(endpoint)
        for request in requests:
            outputs[request.index] = output = ask(endpoint, request, gaps=config.variant == "off")
            off = baseline.get(request.index) if baseline else None
            _judge_text(request, output, off)
            note = compare(output, off) if off else None
            if note:
                warnings.append(f"request {request.index}: {note}")
        if config.variant != "off":
            warnings += _judge_drafting(endpoint, config, before)
    except NoAnswer as failure:
        return SmokeResult(f"smoke test: {failure}", outputs, tuple(warnings))
    return SmokeResult(None, outputs, tuple(warnings))


def compare(output: Output, off: Output) -> str | None:
    """None where both are equal; a note where they part at a near-tie.

    Raises:
        _Failed: they part where off was sure of its token.
    """
    length = min(len(output.token_ids), len(off.token_ids))
    at = next((i for i in range(length) if output.token_ids[i] != off.token_ids[i]), length)
    if at == length:
        return None
    gap = off.gaps[at] if at < len(off.gaps) else None
    where = f"greedy text differs from off's at token {at}"
    if gap is not None and gap > NEAR_TIE_NATS:
        raise _Failed(f"{where}, where off preferred its token by {gap:.2f} nats")
    return f"{where}, " + ("a near-tie" if gap is not None else "and off's log-probabilities are not known")


def _judge_text(request: Request, output: Output, off: Output | None) -> None:
    if not output.token_ids and not output.text and (off is None or off.text):
        raise _Failed(f"request {request.index} got an empty answer")
    if output.repetition > LOOPING_SHARE and off is not None and off.repetition <= LOOPING_SHARE:
        raise _Failed(
            f"request {request.index} got text that repeats itself ({output.repetition:.0%}, off {off.repetition:.0%})"
        )
    if request.response_format and output.finish_reason == "stop":
        try:
            json.loads(output.text)
        except ValueError:
            raise _Failed(f"request {request.index} asks for structured output and got no JSON") from None


def _judge_drafting(endpoint: Endpoint, config: ServingConfig, before: SpecCounters | None) -> list[str]:
    """Speculation that was asked for and silently is not there is the commonest way to measure nothing."""
    probe = Request(index=-1, arrival_s=None, prompt=_ECHO, max_tokens=MAX_TOKENS)
    ask(endpoint, probe, gaps=False)
    after = counters(endpoint)
    if before is None or after is None:
        return ["the server publishes no counters: whether it drafts cannot be seen"]
    try:
        increase = after - before
    except ValueError as error:
        raise _Failed(str(error)) from None
    if not (increase.draft_tokens or increase.drafted_steps):
        raise _Failed(
            f"{config.label()} was asked for, and nothing was drafted in {increase.decode_steps or 'all'} decode steps"
        )
    if increase.draft_tokens and not increase.accepted_tokens:
        return [f"none of {increase.draft_tokens} draft tokens was accepted"]
    return []


def _length(request: Request) -> int:
    """Tokens where recorded, else a quarter of the characters: only the order matters."""
    if request.input_tokens is not None:
        return request.input_tokens
    if request.token_ids is not None:
        return len(request.token_ids)
    return len(request.prompt or json.dumps(request.messages or "")) // 4
