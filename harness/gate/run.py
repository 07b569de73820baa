"""`tune.py gate`: from settings to a verdict on disk and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from backends.types import BackendError, ConfigError
from harness.environment import environment
from harness.gate.duet import duet_for
from harness.gate.explain import CAUSE_WORDS
from harness.gate.live import CandidateDown, LiveSource
from harness.gate.noise import expectation, keep_noise, noise_file, read_noise
from harness.gate.outputs import Report, github_annotations, markdown, write_outputs
from harness.gate.servers import Servers, runs_both_at_once
from harness.gate.session import GateRun, run_session
from harness.gate.sides import Side, check_side, parse_side
from harness.gate.stored import StoredBaseline, StoredSource, read_baseline, record, refuse_unequal, workload_of
from harness.gate.types import Answer, Rules, Verdict
from harness.gate.workload import Workload
from workloads.load import DEMO_TRACE, load_trace


@dataclass(frozen=True, slots=True)
class Profile:
    budget_s: float
    requests_per_turn: int
    batch_sizes: tuple[int, ...]
    max_output_tokens: int | None
    max_blocks: int


PROFILES: Mapping[str, Profile] = {
    "pr": Profile(budget_s=300.0, requests_per_turn=16, batch_sizes=(4,), max_output_tokens=24, max_blocks=16),
    "nightly": Profile(budget_s=3600.0, requests_per_turn=48, batch_sizes=(1, 8), max_output_tokens=None, max_blocks=48),
}


@dataclass(frozen=True, slots=True)
class GateSettings:
    """What was asked. None takes the profile's value."""

    baseline: str | None = None
    candidate: str | None = None
    record: str | None = None
    trace: str | None = None
    profile: str = "pr"
    budget_s: float | None = None
    out: str = "runs/gate"
    band: float = 0.03
    acceptance_band: float = 0.02
    lossless: bool = True
    requests: int | None = None
    batch_sizes: tuple[int, ...] | None = None
    max_output_tokens: int | None = None
    endpoint_backend: str = "vllm"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise ConfigError(f"--profile: unknown '{self.profile}'; choose from {', '.join(PROFILES)}")
        if self.record is None and (self.baseline is None or self.candidate is None):
            raise ConfigError("gate needs --baseline A and --candidate B, or --record FILE with --baseline A")
        if self.record is not None and (self.baseline is None or self.candidate is not None):
            raise ConfigError("--record FILE goes with --baseline A and without --candidate")
        if not 0 < self.band < 1 or not 0 < self.acceptance_band < 1:
            raise ConfigError("--band and --acceptance-band are shares between 0 and 1: 0.03 is 3 %")

    @property
    def limits(self) -> Profile:
        given = {
            "budget_s": self.budget_s,
            "requests_per_turn": self.requests,
            "batch_sizes": self.batch_sizes,
            "max_output_tokens": self.max_output_tokens,
        }
        return replace(PROFILES[self.profile], **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]  # the names are those of Profile

    @property
    def rules(self) -> Rules:
        return Rules(
            band=self.band,
            acceptance_band=self.acceptance_band,
            lossless=self.lossless,
            max_blocks=self.limits.max_blocks,
        )


def run_gate(settings: GateSettings) -> int:
    """Measure, decide, write gate.json, gate.md and junit.xml. Returns the exit code: 0, 3 or 4; 0 for a recording.

    Raises:
        ConfigError, WorkloadError: what was asked cannot work, a stored baseline from elsewhere included.
        BackendError: the baseline could not be measured.
    """
    limits = settings.limits
    trace = load_trace(settings.trace or DEMO_TRACE)
    workload = Workload(trace, limits.batch_sizes, limits.requests_per_turn, limits.max_output_tokens, settings.seed)
    baseline = settings.baseline or ""
    if settings.record is not None:
        return _record(settings, workload, parse_side("--baseline", baseline, endpoint_backend=settings.endpoint_backend))
    candidate = parse_side("--candidate", settings.candidate or "", endpoint_backend=settings.endpoint_backend)
    check_side("--candidate", candidate, workload.facts())
    if baseline.endswith(".json"):
        return _against_stored(settings, workload, Path(baseline), candidate)
    first = parse_side("--baseline", baseline, endpoint_backend=settings.endpoint_backend)
    check_side("--baseline", first, workload.facts())
    duet = duet_for(first, candidate)
    threads = duet.threads if duet else None
    with Servers(Path(settings.out) / "servers", both_at_once=runs_both_at_once(first, candidate), threads=threads) as servers:
        live = LiveSource(first, candidate, workload, servers, limits.budget_s, duet)
        warnings = _unrestarted(first, candidate)
        return _finish(settings, settings.rules, workload, live, first.to_dict(), candidate, warnings)


def _record(settings: GateSettings, workload: Workload, side: Side) -> int:
    check_side("--baseline", side, workload.facts())
    path = Path(settings.record or "")
    with Servers(Path(settings.out) / "servers", both_at_once=True) as servers:
        live = LiveSource(side, side, workload, servers, settings.limits.budget_s)
        blocks = record(live, blocks=settings.limits.max_blocks, budget_s=settings.limits.budget_s)
    if not blocks:
        raise BackendError(f"--budget {settings.limits.budget_s:.0f}s was over before one block was measured: give more")
    StoredBaseline(side.to_dict(), workload.to_dict(), environment(), _now(), blocks).write(path)
    print(f"recorded {len(blocks)} blocks of {side.label}: {path}")
    return 0


def _against_stored(settings: GateSettings, workload: Workload, path: Path, candidate: Side) -> int:
    stored = read_baseline(path)
    workload = workload_of(stored, workload)
    refuse_unequal(path, stored, environment(), workload.to_dict())
    rules = replace(settings.rules, max_blocks=len(stored.blocks))
    side = {**stored.side, "label": f"{stored.side['label']} (recorded {stored.created} in {path.name})"}
    warnings = ("compared with a stored baseline: a machine that became slower since then looks like a regression",)
    with Servers(Path(settings.out) / "servers", both_at_once=True) as servers:
        live = LiveSource(candidate, candidate, workload, servers, settings.limits.budget_s)
        return _finish(settings, rules, workload, StoredSource(stored, live), side, candidate, warnings)


def _finish(
    settings: GateSettings,
    rules: Rules,
    workload: Workload,
    source: LiveSource | StoredSource,
    baseline: Mapping[str, object],
    candidate: Side,
    warnings: tuple[str, ...],
) -> int:
    budget_s = settings.limits.budget_s
    here = environment()
    file = noise_file(here["fingerprint"], baseline, workload.to_dict())
    known = read_noise(file)
    if line := expectation(known, rules):
        print(f"gate: {line}", file=sys.stderr, flush=True)
    try:
        run = run_session(source, rules, budget_s, _say, known)
    except CandidateDown as error:
        run = GateRun(_down(str(error)), (), source.elapsed_s(), "decided")
    if run.verdict.outcome != "regression":  # what a fault does differs from request to request, which is no noise
        keep_noise(file, known, run.blocks)
    report = Report(run, rules, baseline, candidate.to_dict(), here, _now(), budget_s, source.method, warnings)
    out = Path(settings.out)
    write_outputs(report, out)
    print(markdown(report))
    if os.environ.get("GITHUB_ACTIONS") == "true":
        print("\n".join(github_annotations(report)))
    print(f"gate: {run.verdict.outcome}: {out / 'gate.md'}, {out / 'gate.json'}, {out / 'junit.xml'}")
    return run.verdict.exit_code


def _say(blocks: int, verdict: Verdict) -> None:
    print(f"gate: {2 * blocks} pairs: {verdict.reasons[0]}", file=sys.stderr, flush=True)


def _down(error: str) -> Verdict:
    """The candidate's server does not start, or dies, while the baseline's does not: as red as it gets."""
    answer = Answer("failures", "regressed", error)
    reasons = (f"regression: {CAUSE_WORDS['server']}: {error}",)
    return Verdict("regression", reasons, ("server",), (answer,), (), pairs=0)


def _unrestarted(*sides: Side) -> tuple[str, ...]:
    """What a gate on running servers cannot know."""
    if not any(side.url for side in sides):
        return ()
    return ("a server that already ran was measured in one lifetime: what differs between two starts is not in the noise",)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S")
