"""Replays that bracket the capacity of servers whose capacity is known: the simulated engine in virtual time, and over HTTP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backends.simulated.virtual import SimulatedRequest, SimulatedRun, simulate
from backends.simulated.world import Draft, Limits, TargetCost, World, dump_world
from backends.types import ServingConfig
from harness.capacity import REPLAYS, bracket
from harness.capacity_replays import bracket_capacity
from harness.findings import Findings, closed_load
from harness.job import run_job
from harness.provision import open_loops
from harness.result_schema import validate
from harness.settings import RunSettings
from harness.store import Trial
from harness.types import CAPACITY_STAGE, Load, Role
from reports import render

TOKENS, LIMIT_S = 12, 1.2
SENT = 24  # requests of the main job
WORLD = World(
    "engine",
    TargetCost(fixed_s=0.02, weights_s=0.03, token_s=0.004, prefill_token_s=0.0002),
    drafts={"ngram": Draft({"default": (0.8, 0.64)}, step_fixed_s=0.002)},
    limits=Limits(max_num_seqs=8, prefix_caching=False),
)
"""Off: a step takes 50 ms and 4 ms for each sequence; 8 at a time give about 8 requests of 12 tokens a second."""
OFF = ServingConfig("simulated", "world", max_num_seqs=8)
ON = replace(OFF, variant="ngram", k=2)


def arrivals_of(n: int) -> np.ndarray:
    return np.cumsum(np.random.default_rng(3).exponential(0.3, size=n))


def run_at(arrivals_s: np.ndarray, time_scale: float, config: ServingConfig) -> SimulatedRun:
    asked = [SimulatedRequest(float(at * time_scale), 30, TOKENS) for at in arrivals_s]
    return simulate(WORLD, asked, variant=config.variant, k=config.k)


class VirtualLab:
    """Measures like `harness.lab.Lab`, in virtual time. `fails`: loads at which the client is late."""

    def __init__(self, findings: Findings, arrivals_s: np.ndarray) -> None:
        self.findings, self.arrivals_s, self.fails = findings, arrivals_s, False

    def run(self, config: ServingConfig, load: Load, indices: Sequence[int], role: Role, stage: str) -> Trial:
        if load.mode == "closed":
            asked = [SimulatedRequest(0.0, 30, TOKENS)] * len(indices)
            run = simulate(WORLD, asked, variant=config.variant, k=config.k, concurrency=load.concurrency)
        else:
            run = run_at(self.arrivals_s, load.time_scale or 1.0, config)
        p50, p95 = np.quantile(run.e2e_s, (0.5, 0.95))
        metrics = {
            "requests": {"sent": len(indices), "completed": len(indices)},
            "e2e_s": {"p50": p50, "p95": p95},
            "requests_per_s": len(indices) / run.last_token_s.max(),
            "output_tokens_per_s": run.output_tokens_per_s,
        }
        state: Any = "FAIL" if self.fails and stage == CAPACITY_STAGE else "COMPLETE"
        number = len(self.findings.trials)
        trial = Trial(number, state, role, config, load, f"{number}", stage, tuple(indices), metrics=metrics)
        self.findings.trials.append(trial)
        return trial


def virtual(slo_s: float, batch_sizes: tuple[int, ...] = (1, 4, 8)) -> tuple[VirtualLab, Findings, SimpleNamespace]:
    """A lab, findings that hold the closed loops of both servers, and the trace."""
    arrivals = arrivals_of(80)
    settings = SimpleNamespace(slo={"e2e_p95": slo_s}, time_scale=1.0)
    findings = Findings(settings, SimpleNamespace(batch_sizes=batch_sizes), lambda trial: None)  # type: ignore[arg-type]
    lab = VirtualLab(findings, arrivals)
    for config, stage in ((OFF, "baseline"), (ON, "search")):
        for batch in batch_sizes:
            lab.run(config, closed_load("t", batch), range(80), "search", stage)
    return lab, findings, SimpleNamespace(name="t", arrivals_s=arrivals)


@pytest.mark.parametrize("slo_s", [1.0, 1.2, 1.5, 2.0, 3.0])
def test_the_bracket_holds_the_rate_at_which_the_limit_really_breaks(slo_s: float) -> None:
    lab, findings, trace = virtual(slo_s)
    bracket_capacity(lab, findings, ON, {"t": trace}, {"t": range(80)}, lambda: False)  # type: ignore[arg-type, dict-item]
    own_rate = 79 / (trace.arrivals_s[-1] - trace.arrivals_s[0])
    for config in (OFF, ON):
        replays = open_loops(findings, trace, config)  # type: ignore[arg-type]
        assert 2 <= len(replays) <= REPLAYS
        passing, failing = bracket(replays)
        assert passing is not None
        assert failing is not None
        rates = np.geomspace(0.3 * passing.requests_per_s, 3 * failing.requests_per_s, 400)
        meets = [np.quantile(run_at(trace.arrivals_s, own_rate / r, config).e2e_s, 0.95) <= slo_s for r in rates]
        breaks = rates[meets.index(False)]
        assert passing.requests_per_s < breaks * 1.1  # p95 of a finite replay is not monotone to the last per cent
        assert breaks <= failing.requests_per_s


def test_more_than_saturated_closed_loops_complete_is_a_failure_even_where_a_short_replay_meets_the_limit() -> None:
    lab, findings, trace = virtual(100.0, (1, 4, 8, 16))  # 16 in flight are 8 that run and 8 that wait
    bracket_capacity(lab, findings, ON, {"t": trace}, {"t": range(80)}, lambda: False)  # type: ignore[arg-type, dict-item]
    for config in (OFF, ON):
        passing, failing = bracket(open_loops(findings, trace, config))  # type: ignore[arg-type]
        closed = [t.metrics["requests_per_s"] for t in findings.trials if t.config == config and t.load.mode == "closed"]  # type: ignore[index]
        assert passing is not None
        assert failing is not None
        assert failing.broken == ("saturation",)
        assert passing.requests_per_s <= 1.05 * max(closed) < failing.requests_per_s


def test_a_replay_that_cannot_be_measured_ends_the_search_and_gives_no_number() -> None:
    lab, findings, trace = virtual(1.5)
    lab.fails = True
    bracket_capacity(lab, findings, ON, {"t": trace}, {"t": range(80)}, lambda: False)  # type: ignore[arg-type, dict-item]
    assert sum(trial.stage == CAPACITY_STAGE for trial in findings.trials) == 2  # one of each server
    assert open_loops(findings, trace, OFF) == []  # type: ignore[arg-type]


def test_nothing_is_sent_when_the_budget_is_used_up() -> None:
    lab, findings, trace = virtual(1.5)
    bracket_capacity(lab, findings, ON, {"t": trace}, {"t": range(80)}, lambda: True)  # type: ignore[arg-type, dict-item]
    assert not any(trial.stage == CAPACITY_STAGE for trial in findings.trials)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("capacity"), WORLD)


def finished(folder: Path, world: World) -> Path:
    """A main job with a limit, on the simulated server."""
    (folder / "world.json").write_text(dump_world(world))
    rows = [
        {"arrival_s": float(at), "prompt": f"number {i} " * 10, "max_tokens": TOKENS} for i, at in enumerate(arrivals_of(SENT))
    ]
    (folder / "steady.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = RunSettings(
        traces=(str(folder / "steady.jsonl"),),
        out=str(folder / "run"),
        backends=("simulated",),
        model=str(folder / "world.json"),
        k=(2,),
        batch_sizes=(2, 8),
        max_num_seqs=8,
        strategy="grid",
        slo={"e2e_p95": LIMIT_S},
        time_scale=0.5,
        search_requests=8,
        confirm_requests=SENT,
    )
    run_job(settings, render)
    return folder / "run"


@pytest.mark.slow
def test_the_main_job_shows_one_replay_that_passed_and_one_that_failed(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    validate(result)
    (entry,) = result["capacity"]
    trials = {trial["number"]: trial for trial in result["trials"]}
    own_rate = (SENT - 1) / (arrivals_of(SENT)[-1] - arrivals_of(SENT)[0])
    for side, config in zip(entry["sides"], (OFF, ON), strict=True):
        passing, failing = side["open_loop"]["passing"], side["open_loop"]["failing"]
        assert passing["requests_per_s"] < failing["requests_per_s"]
        for replayed, holds in ((passing, True), (failing, False)):
            trial = trials[replayed["trial"]]
            assert trial["config"]["variant"] == config.variant
            assert replayed["broken"] == ([] if holds else ["e2e_p95"])
            assert (trial["metrics"]["e2e_s"]["p95"] <= LIMIT_S) is holds
        # The same world without a clock: real time adds some milliseconds to each step.
        for rate, holds in ((0.8 * passing["requests_per_s"], True), (1.25 * failing["requests_per_s"], False)):
            p95 = np.quantile(run_at(arrivals_of(SENT), own_rate / rate, config).e2e_s, 0.95)
            assert bool(p95 <= LIMIT_S) is holds
        assert side["sized_by"] == "open loop"
        unscaled = next(row for row in side["fleet"] if row["time_scale"] == 1.0)
        carried = unscaled["replicas_peak"] * passing["requests_per_s"]
        assert unscaled["headroom"] == pytest.approx(1 - entry["demand"]["peak_minute_rps"] / carried)


@pytest.mark.slow
def test_a_draft_that_breaks_the_limit_where_off_keeps_it_is_skip(tmp_path: Path) -> None:
    slow_draft = {"ngram": replace(WORLD.drafts["ngram"], step_fixed_s=0.3)}
    out = finished(tmp_path, replace(WORLD, drafts=slow_draft))
    result = json.loads((out / "result.json").read_text())
    validate(result)
    (decision,) = result["decisions"]
    assert decision["verdict"] == "skip"
    assert decision["config"]["variant"] == "off"
    assert "ngram K=2 breaks e2e_p95 at batch size 2" in decision["reasons"][1]
    assert "ngram K=2 breaks e2e_p95" in (out / "report.html").read_text()


@pytest.mark.slow
def test_the_replays_are_a_stage_of_the_cost_and_no_speed_up(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    replays = [trial for trial in result["trials"] if trial["stage"] == CAPACITY_STAGE]
    assert 2 <= len(replays) <= 2 * REPLAYS
    assert [trial["speedup"] for trial in replays] == [None] * len(replays)
    assert result["search_cost"]["stages"]["capacity"]["loads"] == len(replays)
    page = (run / "report.html").read_text()
    for side in result["capacity"][0]["sides"]:
        assert f"trial {side['open_loop']['passing']['trial']}" in page
        assert f"trial {side['open_loop']['failing']['trial']}" in page


def test_a_load_that_off_cannot_carry_rules_nothing_out() -> None:
    off_s, on_s = {1: 0.7, 8: 1.3}, {1: 0.6, 8: 1.2}

    def findings_of(on_s: dict[int, float], limit_s: float) -> Findings:
        found = virtual(limit_s)[1]
        found.trials.clear()
        for config, stage, p95 in ((OFF, "baseline", off_s), (ON, "search", on_s)):
            for batch, value in p95.items():
                metrics = {"e2e_s": {"p50": value / 2, "p95": value}}
                load, number = closed_load("t", batch), len(found.trials)
                found.trials.append(Trial(number, "COMPLETE", "search", config, load, "", stage, (), metrics=metrics))
        return found

    assert findings_of(on_s, 1.4).breach(ON) is None
    assert findings_of(on_s, 1.0).breach(ON) is None  # 8 at a time are too many, with or without speculation
    through_speculation = findings_of({1: 1.1, 8: 1.2}, 1.0).breach(ON)
    assert through_speculation == "ngram K=2 breaks e2e_p95 at batch size 1: 1.1 s while off took 0.7 s; the limit is 1 s"
