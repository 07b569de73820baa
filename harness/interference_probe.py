"""Runs the interference probe on servers: of off and of a finalist, with chunked prefill on and off where the engine has both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import uvloop

from backends.registry import ADAPTERS
from backends.types import BackendError, ConfigError, Endpoint, ServingConfig, WorkloadFacts
from harness.audits import Kept, key_of
from harness.client import ReplayOptions, unseen
from harness.interference import Interference, interference
from harness.lab import Lab
from harness.replay import replay
from harness.store import RunStore
from harness.types import Load, RequestRecord
from workloads.types import Request, WorkloadError

DECODERS, LONG_PROMPTS = 4, 2
DECODE_TOKENS = 128
LONG_CHARACTERS = (8000, 4000, 2000, 1000)  # 8,000 are about 2,000 tokens of English; less where the context refuses that
ARRIVAL_SHARE = 0.35  # of the decoding done when the long prompts arrive


class InterferenceProbe:
    """Probes each finalist and its off, with chunked prefill as configured and the other way round."""

    def __init__(self, lab: Lab, store: RunStore, requests: Mapping[str, Sequence[Request]], seed: int) -> None:
        self._lab, self._seed = lab, seed
        self._requests = [request for few in requests.values() for request in few][:DECODERS]
        self._kept = Kept(store, "interference")
        self._keys: list[str] = []
        self._refused: list[dict[str, Any]] = []

    def run(self, config: ServingConfig) -> None:
        for server in (config.off(), config):  # off is what a run measures last, so that its server is up
            for chunked in (server.chunked_prefill, not server.chunked_prefill):
                self._look(replace(server, chunked_prefill=chunked))

    def result(self) -> list[dict[str, Any]]:
        """Entries of this run's configurations for `result.json`; those that could not be measured hold the problem alone."""
        return [*self._kept.shown(self._keys), *self._refused]

    def _look(self, server: ServingConfig) -> None:
        key = key_of("interference", server)
        if key not in self._keys:
            self._keys.append(key)
        if key in self._kept or (self._lab.settings.endpoints and not server.chunked_prefill):
            return
        label = f"{server.label()}, chunked prefill {'on' if server.chunked_prefill else 'off'}"
        try:
            refused = ADAPTERS[server.backend].supports(server, WorkloadFacts())
            if refused:
                raise ConfigError(refused)
            look = partial(probe_interference, requests=self._requests, seed=self._seed)
            found = self._lab.look(server, look)
        except (BackendError, ConfigError, WorkloadError) as problem:
            self._lab.progress.note(f"  interference of {label} was not measured: {problem}")
            self._refused.append({"config": server.to_dict(), "problem": str(problem)})
            return
        self._kept.add(key, {"config": server.to_dict(), **found.to_dict()})
        self._lab.progress.note(f"  {label}: {found.order}, decoding at {found.pace_during_share:.0%} of its pace meanwhile")


def probe_interference(endpoint: Endpoint, requests: Sequence[Request], *, seed: int = 0) -> Interference:
    """Run the probe on a server: the trace's first prompts decode, its texts strung together are the long prompts.

    Raises:
        BackendError: a request failed, or the phases could not be told apart.
    """
    texts = [_text(request) for request in requests]
    decoding = [_decoder(i, request) for i, request in enumerate((*requests,) * DECODERS) if i < DECODERS]
    alone = _send(endpoint, decoding, seed)
    ends = [r.chunk_s[-1] for r in alone if len(r.chunk_s) > 1]
    starts = [r.chunk_s[0] for r in alone if len(r.chunk_s) > 1]
    if not ends:
        raise BackendError("interference: the decoding requests gave no tokens")
    arrive = max(starts) + ARRIVAL_SHARE * (min(ends) - max(starts))
    for characters in LONG_CHARACTERS:
        long = [_long(DECODERS + i, texts, characters, arrive) for i in range(LONG_PROMPTS)]
        again = [unseen(request, str(characters)) for request in decoding]  # their prompts must not lie in a cache now
        records = _send(endpoint, [*again, *long], seed)
        if all(record.status != "refused" for record in records[DECODERS:]):
            break
    try:
        return interference(records[:DECODERS], records[DECODERS:])
    except ValueError as error:
        raise BackendError(f"interference: {error}") from None


def _send(endpoint: Endpoint, requests: Sequence[Request], seed: int) -> list[RequestRecord]:
    options = ReplayOptions(output_length="recorded", seed=seed, send_lag_limit_s=0.05)
    load = Load(mode="trace", trace="interference", time_scale=1.0)
    return uvloop.run(replay(endpoint, requests, load, options)).records


def _decoder(index: int, request: Request) -> Request:
    return replace(
        request,
        index=index,
        arrival_s=0.0,
        output_tokens=DECODE_TOKENS,
        max_tokens=None,
        sampling={"temperature": 0},
        tools=None,
    )


def _long(index: int, texts: Sequence[str], characters: int, arrive_s: float) -> Request:
    """A prompt of so many characters that begins like no other."""
    text = f"[{index}] " + " ".join(texts)
    while len(text) < characters:
        text += f" ({len(text)}) {text}"
    return Request(index=index, arrival_s=arrive_s, prompt=text[:characters], output_tokens=2, sampling={"temperature": 0})


def _text(request: Request) -> str:
    if request.messages:
        return " ".join(str(message.get("content") or "") for message in request.messages)
    return request.prompt or "one two three four five six seven"
