"""Where the tests find SGLang, and how they start its real server on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends import sglang
from backends.counters import parse_metrics
from backends.http_client import call
from backends.process import Server, free_port
from backends.sglang_server_info import request_counts
from backends.types import Endpoint, ServingConfig, SpecCounters

DEFAULT_PYTHON = Path(__file__).parents[2] / ".venv-sglang" / "bin" / "python"
ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).with_name("sglang_cpu")),  # the kernel stand-in
    "HF_HUB_OFFLINE": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling two small functions takes longer than all the tokens of a test
}
CPU_BASE_ARGS = (
    "--device", "cpu", "--mem-fraction-static", "0.6", "--max-total-tokens", "8192", "--context-length", "2048",
    "--decode-log-interval", "4", "--skip-server-warmup",
)  # fmt: skip


def sglang_python() -> str:
    """The interpreter of SGLang's environment.

    Raises:
        RuntimeError: there is none.
    """
    python = Path(os.environ.get("SPECTUNE_SGLANG_PYTHON", DEFAULT_PYTHON))
    if not python.exists():
        raise RuntimeError(f"{python} is not there: `make test-engines` installs SGLang there")
    return str(python)


@dataclass(frozen=True)
class Answer:
    ids: tuple[int, ...]
    counts: SpecCounters
    verify_steps: int | None


@contextmanager
def running(
    model: Path, folder: Path, *, env: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None, **changes: Any
) -> Iterator[Endpoint]:
    """The server of a configuration with float32 arithmetic, `flags` on its command line and `env` in its environment."""
    extra = {"dtype": "float32", "random_seed": 0, **(flags or {}), "env": {**ENVIRONMENT, **(env or {})}}
    fields = {"backend": "sglang", "model": str(model), "max_num_seqs": 4, "extra": extra}
    settings, port = ServingConfig(**{**fields, **changes}), free_port()
    launch = sglang.launch(settings, port=port, command=(sglang_python(),), base_args=CPU_BASE_ARGS)
    with Server.start(launch, port=port, folder=folder, backend="sglang") as server:
        yield sglang.read_back(server.endpoint, settings, server.log())


def ask(endpoint: Endpoint, prompt: str, tokens: int) -> Answer:
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}
    reply = call(f"{endpoint.base_url}/generate", body, timeout_s=300)
    assert reply is not None
    assert reply.status == 200, reply.body
    answer = reply.json()
    return Answer(tuple(answer["output_ids"]), request_counts(answer["meta_info"]), answer["meta_info"].get("spec_verify_ct"))


def counters(endpoint: Endpoint) -> SpecCounters:
    page = call(f"{endpoint.base_url}/metrics")
    assert page is not None
    return parse_metrics("sglang", page.body)[0]
