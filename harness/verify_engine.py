"""`tune.py verify-engine`: one engine of the user's, looked at end to end before its numbers are believed.

For off and each variant: does it start, is what it says of itself what was asked, does it stream what it counts, does tau from its
counters equal tau from its streams, is greedy text the text of off, and is nothing of it left after its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import uvloop
from rich.console import Console
from rich.table import Column, Table

from backends.process import Server, free_port
from backends.registry import ADAPTERS
from backends.types import BackendError, ConfigError, Endpoint, ServingConfig
from harness.client import ReplayOptions
from harness.job import check_models, facts_of, resolve_model
from harness.replay import replay
from harness.settings import RunSettings
from harness.smoke import Output, smoke_test
from harness.space import build_space
from harness.speculation import DISAGREEMENT, speculation
from harness.types import Load, RequestRecord
from workloads.load import DEMO_TRACE, load_trace
from workloads.types import Request

STREAMED, CONCURRENCY, OUTPUT_TOKENS = 12, 4, 48
COMPARED = 6  # requests whose greedy text is compared with off's
GONE_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Check:
    """One question about one configuration, and what was seen."""

    config: str
    question: str
    seen: str
    passed: bool


def verify_engine(settings: RunSettings, folder: Path) -> list[Check]:
    """Start every configuration of `settings` (one backend) once and ask all questions. Server logs go below `folder`.

    Raises:
        ConfigError: a model or draft that cannot work, or no configuration that this engine accepts.
    """
    settings = replace(settings, model=resolve_model(settings.model))
    sample = load_trace(DEMO_TRACE)
    requests = sorted(sample.requests(), key=lambda request: len(str(request.messages)))[:STREAMED]  # fit any context
    facts = facts_of({"sample": sample.select([request.index for request in requests])}, OUTPUT_TOKENS)
    space = build_space(settings, settings.model, facts)
    if not space.offs:
        raise ConfigError(f"nothing can run: {space.infeasible[0][1]}")
    check_models(space, facts)
    checks = [Check(config.label(), "accepted by the adapter", reason, False) for config, reason in space.infeasible]
    off_text: Mapping[int, Output] = {}
    for config in space.servers:
        Console(stderr=True).print(f"{config.backend}: {config.label()} ...", highlight=False)
        found, text = _verify(config, settings, requests, folder / config.label().replace(" ", "-"), off_text)
        checks += found
        off_text = text if config.variant == "off" else off_text
    return checks


def _verify(
    config: ServingConfig, settings: RunSettings, requests: Sequence[Request], folder: Path, off_text: Mapping[int, Output]
) -> tuple[list[Check], Mapping[int, Output]]:
    label, adapter, port = config.label(), ADAPTERS[config.backend], free_port()
    command = settings.engines.get(config.backend, adapter.DEFAULT_COMMAND)
    text: Mapping[int, Output] = {}
    checks: list[Check] = []
    processes: list[psutil.Process] = []
    try:
        launch = adapter.launch(config, port=port, command=command, base_args=settings.base_args.get(config.backend, ()))
        with Server.start(launch, port=port, folder=folder, backend=config.backend) as server:
            processes = psutil.Process().children(recursive=True)
            endpoint = adapter.read_back(server.endpoint, config, server.log())
            checks += _started(label, endpoint)
            checks += _streams(label, config, endpoint, requests)
            result = smoke_test(endpoint, config, requests[:COMPARED], baseline=off_text or None)
            text = result.outputs
            checks.append(_lossless(label, config, result.failure, result.warnings, bool(off_text)))
    except (BackendError, ConfigError) as error:
        return [*checks, Check(label, "runs", str(error), False)], text
    _, left = psutil.wait_procs(processes, timeout=GONE_WITHIN_S)
    seen = f"{len(left)} of {len(processes)} processes left {GONE_WITHIN_S:.0f} s after its end"
    return [*checks, Check(label, "ends with all its processes", seen, not left)], text


def _started(label: str, endpoint: Endpoint) -> Iterator[Check]:
    yield Check(label, "starts", f"version {endpoint.version or 'unknown'}, ready after {endpoint.startup_s or 0:.1f} s", True)
    seen = "; ".join(endpoint.warnings) or f"{len(endpoint.resolved)} settings read back, as asked"
    yield Check(label, "runs what was asked", seen, not endpoint.warnings)


def _streams(label: str, config: ServingConfig, endpoint: Endpoint, requests: Sequence[Request]) -> Iterator[Check]:
    greedy = [replace(request, sampling={"temperature": 0}) for request in requests]
    load = Load("closed", "sample", concurrency=CONCURRENCY)
    run = uvloop.run(replay(endpoint, greedy, load, ReplayOptions(max_output_tokens=OUTPUT_TOKENS)))
    records = [*run.records, *run.lead]
    failed = sum(r.status != "completed" for r in records)
    yield Check(label, "answers streamed requests", f"{len(records) - failed} of {len(records)} completed", not failed)
    wrong = sum(not _counts_agree(record) for record in records)
    yield Check(label, "streams the tokens it counts", f"{wrong} of {len(records)} streams disagree with usage", not wrong)
    found, warnings, impossible = speculation(run, closed=True)
    if found.tau is None or found.tau_counter is None:
        why = impossible or (warnings[0] if warnings else "it publishes no counters that give tau")
        yield Check(label, "counts the steps that tau needs", why, False)
        return
    apart = abs(found.tau_counter / found.tau - 1)
    in_range = found.tau == 1.0 if config.variant == "off" else 1.0 <= found.tau <= config.k + 1
    seen = f"{found.tau:.3f} from the streams, {found.tau_counter:.3f} from its counters"
    yield Check(label, "tau from counters is tau from streams", seen, apart <= DISAGREEMENT and in_range)


def _counts_agree(record: RequestRecord) -> bool:
    """Whether the chunks of a stream add up to its usage, where each chunk says how many tokens it holds."""
    return not record.chunk_tokens or sum(record.chunk_tokens) == record.output_tokens


def _lossless(label: str, config: ServingConfig, failure: str | None, notes: Sequence[str], compared: bool) -> Check:
    if config.variant == "off":
        return Check(label, "gives sound text", failure or "greedy text kept to compare with", failure is None)
    if not compared:
        return Check(label, "greedy text is off's", "off gave no text to compare with", False)
    seen = failure or "; ".join(notes) or f"equal in {COMPARED} of {COMPARED} requests"
    return Check(label, "greedy text is off's", seen, failure is None)


def print_checks(checks: Sequence[Check]) -> int:
    """The checks as a table; 1 where one failed."""
    table = Table("", Column("configuration", no_wrap=True), Column("question", no_wrap=True), "seen")
    for check in checks:
        table.add_row("pass" if check.passed else "[red]FAIL", check.config, check.question, check.seen.replace("[", r"\["))
    console = Console()
    console.print(table)
    failed = sum(not check.passed for check in checks)
    console.print(f"{len(checks) - failed} of {len(checks)} checks passed", highlight=False)
    return int(failed > 0)
