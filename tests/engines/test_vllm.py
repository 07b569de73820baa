"""The real vLLM server on a CPU: every variant that runs there, through the adapter, the supervisor and the counters.

Targets are small, in float32 and eager mode, so that greedy text must be identical with and without speculation. Heads have
random weights: their drafts are nearly all rejected, which shows the plumbing and the rejection path, not good drafts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import psutil
import pytest
import uvloop
from safetensors.numpy import load_file
from vllm_server import ENV, FLAGS, ROOT, Answer, ask, ask_all, config, counters, python, running, steps_in_metrics

from backends.http_client import call
from backends.reference.demo_model import demo_model_dir
from backends.types import Endpoint, ServingConfig
from harness.client import ReplayOptions
from harness.replay import replay
from harness.smoke import smoke_requests, smoke_test
from harness.types import Load
from workloads.types import Request

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

PROMPTS = (
    "Repeat after me: the quick brown fox jumps over the lazy dog. The quick brown fox jumps over",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "List the months of the year: January, February,",
    "The capital of France is",
)
TOKENS = 40


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small checkpoints: target, mimo (with MTP layer), heads for the target."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), demo_model_dir()
    target = checkpoints.target(folder / "target", tokenizer)
    checkpoints.mimo(folder / "mimo", tokenizer)
    checkpoints.eagle3(folder / "eagle3")
    checkpoints.eagle3(folder / "p_eagle", parallel=True)
    checkpoints.medusa(folder / "medusa", load_file(target / "model.safetensors")["lm_head.weight"])
    return folder


@pytest.fixture(scope="session")
def off_text(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, ...]]]:
    """Greedy token ids without speculation, for each target."""
    return {name: _off(name, models / name, tmp_path_factory.mktemp("off")) for name in ("target", "mimo")}


def _off(name: str, model: Path, folder: Path) -> list[tuple[int, ...]]:
    with running(config(model), folder) as endpoint:
        before = counters(endpoint)
        answers = ask_all(endpoint, PROMPTS, TOKENS)
        grown = counters(endpoint) - before
        assert grown.tau == 1.0, "without speculation every decode step emits one token"
        assert (grown.drafted_steps, grown.tau_drafted) == (None, None), "what vLLM does not publish is unknown, not 0"
    return [answer.token_ids for answer in answers]


def check_counts(settings: ServingConfig, folder: Path, text: list[tuple[int, ...]]) -> list[Answer]:
    """Same text as off, and counters that agree with what vLLM says of each request."""
    with running(settings, folder) as endpoint:
        before, steps_before = counters(endpoint), steps_in_metrics(endpoint)
        answers = ask_all(endpoint, PROMPTS, TOKENS)
        grown, steps = counters(endpoint) - before, steps_in_metrics(endpoint) - steps_before
    assert [answer.token_ids for answer in answers] == text
    accepted = [count for answer in answers for count in answer.per_step_accepted]
    drafted = [count for answer in answers for count in answer.per_step_drafted]
    assert grown.generated_tokens == len(PROMPTS) * TOKENS
    assert grown.tau == (len(PROMPTS) * TOKENS - len(PROMPTS)) / steps
    assert (grown.drafted_steps, grown.draft_tokens, grown.accepted_tokens) == (len(accepted), sum(drafted), sum(accepted))
    assert grown.tau_drafted == (pytest.approx(1 + sum(accepted) / len(accepted)) if accepted else None)
    positions = tuple(sum(count > i for count in accepted) for i in range(settings.k))
    assert grown.accepted_per_position == positions
    return answers


@pytest.mark.parametrize(
    ("variant", "k", "draft"),
    [
        ("ngram", 4, None),
        ("draft_model", 3, "target"),
        ("eagle3", 3, "eagle3"),
        ("p_eagle", 3, "p_eagle"),
        ("medusa", 3, "medusa"),
    ],
)
def test_text_equals_off_and_counts_equal_each_requests_own(
    variant: str, k: int, draft: str | None, models: Path, off_text: dict[str, list[tuple[int, ...]]], tmp_path: Path
) -> None:
    settings = config(models / "target", variant, k, draft=str(models / draft) if draft else None)
    answers = check_counts(settings, tmp_path, off_text["target"])
    if variant == "draft_model":  # the target drafts for itself: everything is accepted
        assert {count for answer in answers for count in answer.per_step_accepted} == {k}


def test_mtp_of_the_targets_own_checkpoint(models: Path, off_text: dict[str, list[tuple[int, ...]]], tmp_path: Path) -> None:
    check_counts(config(models / "mimo", "mtp", 1), tmp_path, off_text["mimo"])


def test_suffix_where_its_package_is_installed(
    models: Path, off_text: dict[str, list[tuple[int, ...]]], tmp_path: Path
) -> None:
    probe = subprocess.run([python(), "-c", "import arctic_inference"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("arctic-inference is not installed in vLLM's environment")
    check_counts(config(models / "target", "suffix", 4), tmp_path, off_text["target"])


def test_a_schedule_of_k_takes_effect_across_its_threshold(models: Path, tmp_path: Path) -> None:
    settings = config(models / "target", "draft_model", 4, draft=str(models / "target"))
    scheduled = {**settings.extra, "k_schedule": [[1, 2, 4], [3, 16, 1]]}
    settings = ServingConfig.from_dict({**settings.to_dict(), "extra": scheduled})
    with running(settings, tmp_path) as endpoint:
        alone = ask_all(endpoint, PROMPTS, TOKENS)
        crowd = ask_all(endpoint, [f"{i} {prompt}" for i in range(2) for prompt in PROMPTS], 3 * TOKENS, concurrency=8)
    # The last steps of a request are cut to the tokens that are left, so the commonest size is looked at.
    assert _commonest(alone) == 4
    assert _commonest(crowd) == 1


def _commonest(answers: list[Answer]) -> int:
    sizes = [size for answer in answers for size in answer.per_step_drafted]
    return max(set(sizes), key=sizes.count)


def test_a_chunk_is_not_a_step(models: Path, tmp_path: Path) -> None:
    """tau comes from tokens and steps; dividing by streamed chunks would be wrong wherever vLLM merges steps into one chunk."""
    requests = [Request(index=i, arrival_s=0.0, prompt=f"{i} {p}", max_tokens=64) for i, p in enumerate(PROMPTS * 4)]
    requests = [Request(**{**_fields(r), "sampling": {"temperature": 0, "ignore_eos": True}}) for r in requests]
    load = Load(mode="closed", trace="test", concurrency=8)
    with running(config(models / "target", "ngram", 4), tmp_path) as endpoint:
        result = uvloop.run(replay(endpoint, requests, load, ReplayOptions()))
    assert result.counters is not None
    records = [*result.records, *result.lead]
    tokens = sum(record.output_tokens or 0 for record in records)
    assert result.counters.generated_tokens == tokens
    assert all(sum(record.chunk_tokens) == record.output_tokens for record in records)
    chunks = sum(len(record.chunk_tokens) - 1 for record in records)  # the first chunk holds the prefill's token
    assert result.counters.decode_steps is not None
    assert chunks <= result.counters.decode_steps
    assert result.counters.tau is not None
    assert 1.0 < result.counters.tau <= 5.0


def _fields(request: Request) -> dict[str, object]:
    return {name: getattr(request, name) for name in request.__dataclass_fields__}


@pytest.fixture(scope="module")
def dial(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[object, Path, list[str], list[Answer]]]:
    """A server with the known-text drafter, its file, prompts, and the text that the target itself gives."""
    folder = tmp_path_factory.mktemp("dial")
    known = folder / "known.json"
    known.write_text('{"p": 0.0, "texts": []}')
    env = {**ENV, "KNOWN_TEXT": str(known), "PYTHONPATH": str(Path(__file__).parent / "proposers")}
    spec = {"method": "custom_class", "model": "known_text.KnownTextProposer"}
    settings = config(models / "target", "ngram", 4, flags={"env": env, "speculative": spec})
    prompts = [f"{i} times {i * 7} is" for i in range(60)]
    with running(settings, folder) as endpoint:
        yield endpoint, known, prompts, ask_all(endpoint, prompts, 400, concurrency=16)


@pytest.mark.parametrize("p", [0.5, 0.7, 0.9])
def test_position_rates_follow_a_known_acceptance(p: float, dial: tuple[object, Path, list[str], list[Answer]]) -> None:
    endpoint, known, prompts, plain = dial
    texts = [[*_ids(endpoint, prompt), *answer.token_ids] for prompt, answer in zip(prompts, plain, strict=True)]
    known.write_text(json.dumps({"p": p, "texts": texts}))
    before = counters(endpoint)
    answers = ask_all(endpoint, prompts, 400, concurrency=16)
    grown = counters(endpoint) - before
    assert [a.token_ids for a in answers] == [a.token_ids for a in plain]
    assert grown.drafted_steps is not None
    assert grown.drafted_steps >= 5000
    assert grown.accepted_per_position is not None
    rates = [count / grown.drafted_steps for count in grown.accepted_per_position]
    assert rates == pytest.approx([p**i for i in (1, 2, 3, 4)], abs=0.03)


def _ids(endpoint: Endpoint, prompt: str) -> list[int]:
    reply = call(f"{endpoint.base_url}/tokenize", {"model": endpoint.model, "prompt": prompt})
    assert reply is not None
    ids: list[int] = reply.json()["tokens"]
    return ids


def test_the_smoke_test_passes_on_the_demo_model_and_finds_the_same_text(tmp_path: Path) -> None:
    model = demo_model_dir()
    requests = smoke_requests([Request(index=i, arrival_s=0.0, prompt=p, max_tokens=32) for i, p in enumerate(PROMPTS)])
    with running(config(model), tmp_path / "off") as endpoint:
        off = smoke_test(endpoint, config(model), requests)
    assert off.failure is None
    settings = config(model, "draft_model", 3, draft=str(model))
    with running(settings, tmp_path / "on") as endpoint:
        on = smoke_test(endpoint, settings, requests, baseline=off.outputs)
        repeated = ask(endpoint, PROMPTS[0], 48)
    assert (on.failure, on.warnings) == (None, ())
    assert sum(repeated.per_step_accepted) / len(repeated.per_step_accepted) > 2.9  # its own draft: nearly all is accepted


HARNESS = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from backends import vllm
from backends.process import Server, free_port
from backends.types import ServingConfig
port = free_port()
config = ServingConfig("vllm", {model!r}, extra={extra!r})
launch = vllm.launch(config, port=port, command=({python!r},), base_args=())
Server.start(launch, port=port, folder=Path({folder!r}), backend="vllm")
"""


def test_nothing_of_vllm_is_left_10_s_after_the_harness_is_killed_while_it_starts(models: Path, tmp_path: Path) -> None:
    values = {
        "root": str(ROOT),
        "model": str(models / "target"),
        "extra": {**FLAGS, "env": ENV},
        "python": python(),
        "folder": str(tmp_path),
    }
    with subprocess.Popen([sys.executable, "-c", HARNESS.format(**values)]) as harness:
        family = _wait_for_family(harness.pid)
        harness.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family):
        assert time.monotonic() < deadline, [process.cmdline() for process in family if process.is_running()]
        time.sleep(0.1)


def _wait_for_family(pid: int) -> list[psutil.Process]:
    """Descendants of the harness, once vLLM has started its engine process and that its worker."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        family = psutil.Process(pid).children(recursive=True)
        if any("Worker" in process.name() or "VLLM::" in " ".join(process.cmdline()) for process in family):
            return family
        time.sleep(0.2)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("vLLM started no worker within 180 s")
