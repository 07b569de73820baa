"""The adapter: what it refuses, the command it builds, and what it reads back from a running server's page."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import PROMPTS, Build, generate, request

from backends.counters import parse_metrics
from backends.reference import adapter
from backends.reference.__main__ import parse
from backends.reference.metrics import render
from backends.types import BackendError, Endpoint, ServingConfig, WorkloadFacts

FACTS = WorkloadFacts(max_input_tokens=100, max_output_tokens=50, sampling_parameters=frozenset({"temperature", "seed"}))


def config(folder: Path, **fields: Any) -> ServingConfig:
    return ServingConfig(backend="reference", model=str(folder), **fields)


@pytest.mark.parametrize(
    ("fields", "facts", "message"),
    [
        ({}, {}, None),
        ({"variant": "suffix", "k": 4}, {}, None),
        ({"variant": "mtp", "k": 2}, {}, None),
        ({"variant": "eagle3", "k": 4, "draft": "d", "topk": 4, "num_draft_tokens": 16}, {}, None),
        ({"variant": "ngram", "k": 4, "extra": {"k_schedule": [[1, 8, 4], [9, 64, 0]]}}, {}, None),
        ({"variant": "dflash", "k": 4, "draft": "d"}, {}, "no variant dflash"),
        ({"variant": "eagle3", "k": 4}, {}, "eagle3 needs a draft: a directory"),
        ({"variant": "draft_model", "k": 4}, {}, "a directory, or self-int4"),
        ({"variant": "p_eagle", "k": 4, "draft": "d", "topk": 2, "num_draft_tokens": 8}, {}, "p_eagle drafts chains"),
        ({"variant": "eagle3", "k": 4, "draft": "d", "topk": 2}, {}, "needs num_draft_tokens from 5 to 15"),
        ({"variant": "ngram", "k": 2, "extra": {"k_schedule": [[1, 8, 4]]}}, {}, "between 0 and the configuration's K = 2"),
        ({"weight_quantization": "awq"}, {}, "quantizes to none, int8, int4, fp8 only"),
        ({"kv_cache_dtype": "fp8"}, {}, None),
        ({"kv_cache_dtype": "int8", "variant": "eagle3", "k": 2, "draft": "d"}, {}, None),
        ({"kv_cache_dtype": "nvfp4"}, {}, "no KV-cache type 'nvfp4', it has auto, fp8, int8"),
        ({"tensor_parallel": 2}, {}, "tensor_parallel must be 1"),
        ({}, {"sampling_parameters": frozenset({"min_p"})}, "use min_p"),
        ({}, {"structured_output": True}, "structured output"),
        ({}, {"max_input_tokens": 500}, "needs 550 tokens and the context holds 512"),
        ({"extra": {"max_model_len": 120}}, {}, "needs 150 tokens and the context holds 120"),
    ],
)
def test_what_can_run(fields: dict[str, Any], facts: dict[str, Any], message: str | None, tiny_dir: Path) -> None:
    said = adapter.supports(config(tiny_dir, **fields), replace(FACTS, **facts))
    assert (said is None) if message is None else (said is not None and message in said)


def test_a_model_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    assert "has no config.json" in str(adapter.supports(config(tmp_path), FACTS))


def test_the_command_gives_the_engine_the_same_configuration(tiny_dir: Path) -> None:
    wanted = config(
        tiny_dir,
        variant="eagle3",
        k=4,
        topk=3,
        num_draft_tokens=12,
        draft="heads/e3",
        draft_quantization="int8",
        weight_quantization="int4",
        kv_cache_dtype="int8",
        max_num_seqs=12,
        chunked_prefill=False,
        extra={"k_schedule": [[1, 4, 4], [5, 12, 0]], "forced_acceptance": "0.8,0.5,0.2,0.1", "max_model_len": 300},
    )
    launch = adapter.launch(wanted, port=1234, command=("python",), base_args=("--dtype", "float32"))
    assert launch.argv[:3] == ("python", "-m", "backends.reference")
    assert launch.served_model == tiny_dir.name
    args, options = parse(list(launch.argv[3:]))
    assert args.port == 1234
    assert options.model == tiny_dir
    assert (options.variant, options.k, options.topk, options.num_draft_tokens) == ("eagle3", 4, 3, 12)
    assert (options.draft, options.draft_quantization, options.quantization) == ("heads/e3", "int8", "int4")
    assert options.kv_cache_dtype == "int8"
    assert (options.max_num_seqs, options.chunked_prefill, options.dtype) == (12, False, "float32")
    assert options.k_schedule == ((1, 4, 4), (5, 12, 0))
    assert options.forced_acceptance == (0.8, 0.5, 0.2, 0.1)
    assert options.max_model_len == 300


def test_a_cache_that_is_not_quantized_needs_no_flag(tiny_dir: Path) -> None:
    """A gate starts older revisions, which do not have it."""
    assert "--kv-cache-dtype" not in adapter.launch(config(tiny_dir), port=1, command=("python",), base_args=()).argv


@pytest.fixture
def page_server() -> Iterator[tuple[list[str], Endpoint]]:
    """An endpoint whose /metrics is the page put into the list."""
    pages: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if pages else 503)
            self.end_headers()
            self.wfile.write("".join(pages).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever).start()
    yield pages, Endpoint(base_url=f"http://127.0.0.1:{server.server_port}", model="tiny", backend="reference")
    server.shutdown()
    server.server_close()


def test_a_page_is_read_back_and_what_differs_is_said(
    page_server: tuple[list[str], Endpoint], build: Build, tiny_dir: Path
) -> None:
    pages, endpoint = page_server
    engine = build("eagle3", 2, forced_acceptance=(0.5, 0.2), max_model_len=200, kv_cache_tokens=999)
    pages.append(render(engine, "tiny"))
    asked = config(tiny_dir, variant="eagle3", k=3, max_num_seqs=16, draft="d", kv_cache_dtype="fp8")
    back = adapter.read_back(endpoint, asked, "")
    assert back.kv_cache_tokens == 999
    assert str(back.version).startswith("torch ")
    assert back.resolved["variant"] == "eagle3"
    assert "norm_before_residual" in str(back.resolved["draft_notes"])
    assert back.warnings == (
        "asked for k=3, runs 2",
        "asked for kv_cache_dtype=fp8, runs auto",
        "acceptance is forced to (0.5, 0.2): step costs are real, the text is not",
    )


def test_emulated_fp8_is_warned_of(page_server: tuple[list[str], Endpoint], build: Build, tiny_dir: Path) -> None:
    pages, endpoint = page_server
    pages.append(render(build(quantization="fp8"), "tiny"))
    back = adapter.read_back(endpoint, config(tiny_dir, weight_quantization="fp8", max_num_seqs=16), "")
    assert back.warnings == ("fp8 is emulated: the text and what is accepted are those of e4m3, step costs are not",)
    assert back.resolved["weight_notes"] == back.warnings[0]


def test_a_server_without_a_page_is_an_error(page_server: tuple[list[str], Endpoint], tiny_dir: Path) -> None:
    with pytest.raises(BackendError, match="/metrics cannot be read"):
        adapter.read_back(page_server[1], config(tiny_dir), "")


@pytest.mark.parametrize(("variant", "fields"), [("off", {}), ("suffix", {}), ("eagle3", {"topk": 3, "num_draft_tokens": 12})])
def test_counters_survive_the_page(variant: str, fields: dict[str, int], build: Build) -> None:
    engine = build(variant, 0 if variant == "off" else 4, **fields)
    generate(engine, [request(prompt) for prompt in PROMPTS])
    counters, gauges = parse_metrics("reference", render(engine, "tiny"))
    own = engine.counters
    for name in ("generated_tokens", "first_tokens", "decode_steps", "drafted_steps", "draft_tokens", "accepted_tokens"):
        assert getattr(counters, name) == getattr(own, name), name
    assert counters.accepted_per_position == (tuple(own.accepted_per_position) or None)
    assert (counters.prompt_tokens, counters.preemptions, counters.engine_steps) == (own.prompt_tokens, 0, own.engine_steps)
    assert counters.tau == pytest.approx(1 + own.accepted_tokens / own.decode_steps)
    assert (gauges.running, gauges.waiting, gauges.kv_use) == (0, 0, 0)
    assert counters.process_start_s is not None
