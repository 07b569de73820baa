"""Gates on real servers with a tiny random model: the budget holds, files appear, exit codes are those of the contract."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from backends.types import BackendError, ConfigError
from benchmarks.gate_real import ENGINE, FAULTS
from harness.client import unseen
from harness.gate.cli import gate
from harness.gate.live import LiveSource
from harness.gate.sample import sample_of
from harness.gate.servers import Servers
from harness.gate.session import OutOfTime
from harness.gate.sides import parse_side
from harness.gate.types import Sample
from harness.gate.workload import Workload
from harness.replay import Replay
from harness.types import Measurement
from workloads.load import load_trace
from workloads.types import Request


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = [{"prompt": f"again and again number {i % 4} again", "max_tokens": 8, "temperature": 0} for i in range(12)]
    path = tmp_path / "loop.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.slow
def test_a_candidate_that_does_not_start_is_red(tmp_path: Path, trace: str, tiny_model: Path) -> None:
    side = f"--model {tiny_model} --variant ngram --k 2"
    code = gate(
        baseline=side,
        candidate=f"{side} --base-args '--no-such-flag'",
        trace=trace,
        requests=4,
        batch_sizes="2",
        budget="180s",
        out=str(tmp_path / "out"),
    )
    assert code == 3
    found = json.loads((tmp_path / "out" / "gate.json").read_text())
    assert found["causes"] == ["server"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_drafter_whose_drafts_are_spoiled_is_red_for_acceptance(tmp_path: Path, tiny_model: Path) -> None:
    rows = [{"prompt": f"again and again number {i} again and again", "max_tokens": 48, "temperature": 0} for i in range(32)]
    loops = tmp_path / "loops.jsonl"
    loops.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = gate(
        baseline=f"--model {tiny_model} {ENGINE}",
        candidate=f"--model {tiny_model} {FAULTS['draft'].candidate}",
        trace=str(loops),
        requests=16,
        max_output_tokens=48,
        budget="240s",
        out=str(tmp_path / "out"),
    )
    assert code == 3
    assert "acceptance" in json.loads((tmp_path / "out" / "gate.json").read_text())["causes"]


@pytest.mark.slow
def test_a_baseline_that_does_not_start_is_no_verdict(tmp_path: Path, trace: str, tiny_model: Path) -> None:
    side = f"--model {tiny_model} --base-args '--no-such-flag'"
    with pytest.raises(BackendError, match="baseline: "):
        gate(baseline=side, candidate=side, trace=trace, requests=4, batch_sizes="2", budget="60s", out=str(tmp_path / "out"))


@pytest.mark.slow
def test_a_block_that_cannot_end_within_the_budget_is_given_up(tmp_path: Path, trace: str, tiny_model: Path) -> None:
    side = parse_side("--baseline", f"--model {tiny_model}")
    with Servers(tmp_path, both_at_once=True) as servers:
        live = LiveSource(side, side, Workload(load_trace(trace), (2,), 4, 8), servers, budget_s=0.5)
        with pytest.raises(OutOfTime):
            live.block(0)


@pytest.mark.slow
def test_both_sides_get_equal_lead_ins_and_the_two_turns_of_a_side_others(
    tmp_path: Path, trace: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[str | None] = []
    leads: list[set[str | None]] = []

    def marked(request: Request, salt: str) -> Request:
        prompts.append(unseen(request, salt).prompt)
        return unseen(request, salt)

    def end_of_turn(loads: Sequence[tuple[Replay, Measurement]], requests: Sequence[Request]) -> Sample:
        leads.append(set(prompts[:2]))
        prompts.clear()
        return sample_of(loads, requests)

    monkeypatch.setattr("harness.replay.unseen", marked)
    monkeypatch.setattr("harness.gate.live.sample_of", end_of_turn)
    side = parse_side("--baseline", f"--model {tiny_model}")
    with Servers(tmp_path, both_at_once=True) as servers:
        LiveSource(side, side, Workload(load_trace(trace), (2,), 4, 8), servers, budget_s=120.0).block(0)
    assert len(leads) == 4
    first, second = leads[0], leads[3]
    assert leads == [first, first, second, second]  # baseline, candidate, candidate, baseline
    assert first.isdisjoint(second)


@pytest.mark.slow
def test_recording_and_comparing_with_the_recording(tmp_path: Path, trace: str, tiny_model: Path) -> None:
    side = f"--model {tiny_model} --variant ngram --k 2"
    stored, out = tmp_path / "baseline.json", tmp_path / "out"
    common = {"trace": trace, "requests": 4, "batch_sizes": "2", "budget": "60s"}
    assert gate(baseline=side, record=str(stored), out=str(tmp_path / "record"), **common) == 0
    recorded = json.loads(stored.read_text())
    assert recorded["environment"]["fingerprint"].startswith("sha256:")
    code = gate(baseline=str(stored), candidate=side, out=str(out), **common)
    assert code in (0, 4)  # equal sides are never red; whether they pass is for the noise of this machine to say
    found = json.loads((out / "gate.json").read_text())
    assert found["exit_code"] == code
    assert found["elapsed_s"] <= 66.0
    assert next(m for m in found["metrics"] if m["key"] == "tau@2")["status"] in ("equal", "unclear")
    recorded["environment"]["host"]["cpu"] = "another"
    stored.write_text(json.dumps(recorded))
    with pytest.raises(ConfigError, match=r"environment\.host\.cpu was another"):
        gate(baseline=str(stored), candidate=side, out=str(out), **common)
