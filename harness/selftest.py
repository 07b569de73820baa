"""The client against a server whose truth is known: what this machine can be trusted to measure.

A simulated server runs beside the client and logs when it wrote which tokens. Every check compares what the client measured with
that log, or what it concluded with the fault that was injected.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import uvloop

from backends.cached import cache_folder
from backends.files import write_whole
from backends.process import Server, free_port
from backends.types import Endpoint, Launch
from harness.client import ReplayOptions
from harness.measure import measure
from harness.replay import Replay, replay
from harness.types import Load, Measurement, RequestRecord
from harness.warmup import warm_up
from workloads.types import Request

ROOT = Path(__file__).resolve().parents[1]
SPECULATION = ("--variant", "draft_model", "--k", "4")
STALL_S = 0.5
OPTIONS = ReplayOptions(seed=0, request_deadline_s=20.0)


@dataclass(frozen=True, slots=True)
class Check:
    """One known truth. `measured` and `true` are for people; `passed` was decided with `limit` (None: they must be equal)."""

    name: str
    measured: str
    true: str
    limit: str | None
    passed: bool


def selftest() -> list[Check]:
    """All checks, in about 40 seconds.

    Raises:
        BackendError: the simulated server does not start.
    """
    return [*timing(), *faults()]


def timing() -> list[Check]:
    """The checks whose outcome depends on the machine, in about 15 seconds.

    Raises:
        BackendError: the simulated server does not start.
    """
    return [
        *accuracy(Load("closed", "selftest", concurrency=8), 80),
        *accuracy(Load("trace", "selftest"), 250),
        *stall(),
    ]


def keep(checks: Sequence[Check], fingerprint: str) -> dict[str, Any]:
    """Remember what was found on the machine of this fingerprint; returns it as `result.json` shows it."""
    found = {"date": datetime.now(UTC).date().isoformat(), "checks": [asdict(check) for check in checks]}
    write_whole(_kept_at(fingerprint), json.dumps(found, indent=1) + "\n")
    return found


def kept(fingerprint: str) -> dict[str, Any] | None:
    """What the last self-test found on the machine of this fingerprint; None where there was none."""
    path = _kept_at(fingerprint)
    return json.loads(path.read_text()) if path.exists() else None


def _kept_at(fingerprint: str) -> Path:
    return cache_folder("selftest") / f"{fingerprint.removeprefix('sha256:')[:16]}.json"


def workload(count: int, *, rate_rps: float = 50.0, seed: int = 0) -> list[Request]:
    """Requests of 20-200 input and 20-80 output tokens with Poisson arrivals."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate_rps, count))
    return [
        Request(
            index=i,
            arrival_s=float(arrivals[i]),
            prompt=" ".join(f"w{n}" for n in rng.integers(10_000, size=rng.integers(20, 200))),
            max_tokens=int(rng.integers(20, 80)),
            category=("code", "chat")[i % 2],
        )
        for i in range(count)
    ]


@contextmanager
def simulated(*arguments: str) -> Iterator[tuple[Endpoint, Path]]:
    """A running simulated server and the file of its truth log. Readiness is asked of /health alone: the log shall hold no other
    requests than the test's, and a server with a fault may refuse the first."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="spectune-") as folder:
        truth = Path(folder) / "truth.jsonl"
        common = ["--world", "small", "--port", str(port), "--startup", "0", "--truth", str(truth)]
        command = (sys.executable, "-m", "backends.simulated", *common, *arguments)
        launch = Launch(command, env={"PYTHONPATH": str(ROOT)}, served_model="simulated")
        with Server(launch, port=port, folder=Path(folder), backend="simulated") as server:
            server.wait_healthy(60.0)
            yield server.endpoint, truth


def truths(path: Path) -> dict[str, dict[str, Any]]:
    """The server's truth log, by request id."""
    return {line["request_id"]: line for line in map(orjson.loads, path.read_bytes().splitlines())}


async def _warm_replay(endpoint: Endpoint, requests: Sequence[Request], load: Load) -> Replay:
    await warm_up(endpoint, requests, load, OPTIONS)
    return await replay(endpoint, requests, load, OPTIONS)


def true_latencies(run: Replay, log: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Latencies of each request by the server's log, from the client's intended times."""
    found: dict[str, list[float]] = {"TTFT": [], "E2E": [], "TPOT": []}
    for record in run.records:
        truth = log[f"{run.run_id}-{record.index}"]
        intended_s = run.start_clock_s + record.intended_s
        first, last, tokens = truth["first_token_s"], truth["last_token_s"], truth["output_tokens"]
        found["TTFT"].append(first - intended_s)
        found["E2E"].append(last - intended_s)
        found["TPOT"].append((last - first) / (tokens - 1))
    return found


def accuracy(load: Load, count: int, *, rate_rps: float = 50.0) -> list[Check]:
    """Percentiles, token counts, throughput and tau of one load against the log."""
    with simulated(*SPECULATION) as (endpoint, path):
        run = uvloop.run(_warm_replay(endpoint, workload(count, rate_rps=rate_rps), load))
        log = truths(path)
    measured = measure(run, load)
    label = f"closed loop {load.concurrency}" if load.concurrency else f"open loop {rate_rps:g}/s"
    checks = [Check(f"{label}: load is valid", measured.invalid or "valid", "valid", None, measured.invalid is None)]
    if any(record.status != "completed" for record in run.records):
        return [*checks, Check(f"{label}: completed", str(measured.requests["failures"]), "all", None, False)]
    truth = true_latencies(run, log)
    for name, summary, floor_s in (
        ("TTFT", measured.ttft_s, 1e-3),
        ("E2E", measured.e2e_s, 1e-3),
        ("TPOT", measured.tpot_s, 5e-5),
    ):
        assert summary is not None, "requests completed, so they have latencies"
        for quantile, value in ((0.5, summary.p50), (0.95, summary.p95)):
            expected = float(np.quantile(truth[name], quantile))
            checks.append(_near(f"{label}: {name} p{quantile * 100:g}", value, expected, max(0.01 * expected, floor_s)))
    mine = {f"{run.run_id}-{r.index}": list(r.chunk_tokens) for r in run.records}
    wrong = sum(tokens != log[key]["chunk_tokens"] for key, tokens in mine.items())
    checks.append(Check(f"{label}: requests with wrong token counts", str(wrong), "0", None, wrong == 0))
    return [*checks, _tau(label, run, measured, log)]


def _tau(label: str, run: Replay, measured: Measurement, log: dict[str, dict[str, Any]]) -> Check:
    rows = [row for key, row in log.items() if key.startswith(run.run_id)]
    tokens, steps = sum(row["output_tokens"] - 1 for row in rows), sum(row["decode_steps"] for row in rows)
    tau = measured.speculation.tau
    text = "unknown" if tau is None else f"{tau:.4f}"
    return Check(f"{label}: tau", text, f"{tokens / steps:.4f} ({tokens} / {steps})", None, tau == tokens / steps)


def _near(name: str, value: float, expected: float, limit: float) -> Check:
    passed = abs(value - expected) <= limit
    return Check(name, f"{value * 1e3:.2f} ms", f"{expected * 1e3:.2f} ms", f"{limit * 1e3:.2f} ms", passed)


def stall() -> list[Check]:
    """The server stops for half a second: requests that were due meanwhile waited, whether or not the client could send them."""
    load = Load("trace", "selftest")
    with simulated(*SPECULATION, "--fault", f"stall={STALL_S}@60") as (endpoint, path):
        run = uvloop.run(replay(endpoint, workload(150), load, OPTIONS))
        log = truths(path)
    measured = float(np.quantile([r.ttft_s for r in run.records if r.ttft_s is not None], 0.99))
    expected = float(np.quantile(true_latencies(run, log)["TTFT"], 0.99))
    check = _near(f"stall of {STALL_S * 1e3:.0f} ms: TTFT p99", measured, expected, max(0.01 * expected, 2e-3))
    seen = expected > 0.8 * STALL_S
    return [Check(check.name, check.measured, check.true, check.limit, check.passed and seen)]


@dataclass(frozen=True, slots=True)
class FaultCase:
    """A fault, and how each of the requests must be classified."""

    fault: str
    status: str
    failure: str | None = None
    tokens: int | None = 20  # of each completed request
    has_ttft: bool = True


FAULT_CASES = (
    FaultCase("role_first", "completed"),
    FaultCase("reasoning", "completed"),
    FaultCase("tool_call", "completed"),
    FaultCase("bundled_first", "completed"),
    FaultCase("usage_missing", "completed"),
    FaultCase("usage_last_choice", "completed"),
    FaultCase("usage_every", "completed"),
    FaultCase("crlf", "completed"),
    FaultCase("utf8_split", "completed"),
    FaultCase("no_done", "completed"),
    FaultCase("early_eos", "completed", tokens=5),
    FaultCase("empty_output", "completed", tokens=0, has_ttft=False),
    FaultCase("http_error=503", "failed", "http_503", tokens=None),
    FaultCase("http_error=400", "refused", "http_400", tokens=None),
    FaultCase("error_event", "failed", "error_event", tokens=None),
    FaultCase("cut", "failed", "truncated", tokens=None),
)


def faults() -> list[Check]:
    """Every fault of a stream, classified."""
    requests = [Request(i, None, messages=[{"role": "user", "content": f"question {i}"}], max_tokens=20) for i in range(4)]
    load = Load("closed", "selftest", concurrency=2)
    checks = []
    for case in FAULT_CASES:
        with simulated(*SPECULATION, "--fault", case.fault) as (endpoint, _):
            run = uvloop.run(replay(endpoint, requests, load, OPTIONS))
        measured, true = sorted({_outcome(r) for r in run.records}), [_expected(case)]
        checks.append(Check(f"fault {case.fault}", "; ".join(measured), "; ".join(true), None, measured == true))
    return checks


def _outcome(record: RequestRecord) -> str:
    text = record.status if record.failure is None else f"{record.status} ({record.failure})"
    if record.status != "completed":
        return text
    return f"{text}, {record.output_tokens} tokens, {'a' if record.ttft_s is not None else 'no'} TTFT"


def _expected(case: FaultCase) -> str:
    text = case.status if case.failure is None else f"{case.status} ({case.failure})"
    if case.status != "completed":
        return text
    return f"{text}, {case.tokens} tokens, {'a' if case.has_ttft else 'no'} TTFT"


def as_table(checks: Sequence[Check]) -> str:
    """The checks as lines for a terminal."""
    width = max(len(check.name) for check in checks)
    lines = [
        f"{'pass' if c.passed else 'FAIL'}  {c.name:<{width}}  measured {c.measured}, true {c.true}"
        + (f" (within {c.limit})" if c.limit else "")
        for c in checks
    ]
    return "\n".join([*lines, f"{sum(c.passed for c in checks)} of {len(checks)} passed"])
