"""A real vLLM server for tests: started through the adapter and the supervisor, questioned over HTTP."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from backends import vllm
from backends.counters import parse_metrics
from backends.http_client import call
from backends.process import Server, free_port
from backends.types import Endpoint, ServingConfig, SpecCounters

ROOT = Path(__file__).parents[2]
FLAGS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024}
DETAILS = {"enable_per_request_metrics": True, "per_request_spec_decode_metrics": "detailed"}  # refused without speculation
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}


def python() -> str:
    path = os.environ.get("SPECTUNE_VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))
    if not Path(path).exists():
        pytest.fail(f"{path} does not exist: `make test-engines` installs vLLM there")
    return path


def config(
    model: Path, variant: str = "off", k: int = 0, *, flags: Mapping[str, Any] | None = None, **changes: Any
) -> ServingConfig:
    extra = {**FLAGS, **({} if variant == "off" else DETAILS), "env": ENV, **(flags or {})}
    return ServingConfig(
        **{"backend": "vllm", "model": str(model), "variant": variant, "k": k, "max_num_seqs": 16, "extra": extra, **changes}
    )


@contextmanager
def running(settings: ServingConfig, folder: Path) -> Iterator[Endpoint]:
    """The server, read back; what differs from `settings` is a failure of the test."""
    port = free_port()
    launch = vllm.launch(settings, port=port, command=(python(),), base_args=())
    with Server.start(launch, port=port, folder=folder, backend="vllm") as server:
        endpoint = vllm.read_back(server.endpoint, settings, server.log())
        # What vLLM misjudges on a CPU is warned of wherever drafts are verified, and is the only warning.
        assert ["issues/55005" in warning for warning in endpoint.warnings] == [True] * (settings.variant != "off")
        yield endpoint


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    per_step_accepted: tuple[int, ...]
    per_step_drafted: tuple[int, ...]


def ask(endpoint: Endpoint, prompt: str | Sequence[int], max_tokens: int) -> Answer:
    fields = {"model": endpoint.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    reply = call(f"{endpoint.base_url}/v1/completions", {**fields, "return_token_ids": True}, timeout_s=300)
    assert reply is not None
    assert reply.status == 200, reply.body
    body = reply.json()
    spec = (body.get("metrics") or {}).get("speculative_decoding") or {}
    return Answer(
        tuple(body["choices"][0]["token_ids"]),
        tuple(spec.get("per_step_accepted") or ()),
        tuple(spec.get("per_step_drafted") or ()),
    )


def ask_all(endpoint: Endpoint, prompts: Sequence[str | Sequence[int]], max_tokens: int, concurrency: int = 1) -> list[Answer]:
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda prompt: ask(endpoint, prompt, max_tokens), prompts))


def counters(endpoint: Endpoint) -> SpecCounters:
    page = call(f"{endpoint.base_url}/metrics")
    assert page is not None
    return parse_metrics("vllm", page.body)[0]


def steps_in_metrics(endpoint: Endpoint) -> float:
    """Increases of vLLM's inter-token histogram: its count is read here by hand, as a check on the parser."""
    page = call(f"{endpoint.base_url}/metrics")
    assert page is not None
    return sum(
        float(value) for value in re.findall(r"^vllm:inter_token_latency_seconds_count\{.*\} (\S+)$", page.body, re.MULTILINE)
    )
