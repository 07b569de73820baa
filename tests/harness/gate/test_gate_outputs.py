"""Files and lines that CI systems read."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import xmlschema

from harness.gate.outputs import Report, github_annotations, junit, markdown, write_outputs
from harness.gate.run import _down
from harness.gate.session import GateRun, run_session
from harness.gate.types import Rules
from tests.harness.gate.blocks import ListSource, blocks

SCHEMA = xmlschema.XMLSchema(Path(__file__).parents[2] / "data" / "gate" / "junit.xsd")


def report_of(run: GateRun, label: str = "--variant ngram --k 4") -> Report:
    side = {"label": label}
    return Report(
        run, Rules(), side, side, {"fingerprint": "sha256:0"}, "2026-01-31T12:00:00", 160.0, "in turn", ("a <b> | c",)
    )


def run_of(outcome: str) -> GateRun:
    if outcome == "down":
        return GateRun(_down("candidate: the engine ran out of memory"), (), 3.0, "decided")
    found = {
        "pass": blocks(16, noise=0.003),
        "regression": blocks(16, noise=0.003, tau=2.6 / 3.1),
        "inconclusive": blocks(16, noise=0.11, seed=1),
    }
    run = run_session(ListSource(found[outcome]), Rules(), 160.0)
    assert run.verdict.outcome == outcome
    return run


@pytest.mark.parametrize(
    ("outcome", "failures", "skipped"), [("pass", 0, 1), ("regression", 2, 1), ("inconclusive", 0, 4), ("down", 2, 0)]
)
def test_junit_is_valid_and_counts_what_it_holds(outcome: str, failures: int, skipped: int) -> None:
    # Losslessness is not tested in these blocks, which is one skipped case; the verdict is a case of its own.
    text = junit(report_of(run_of(outcome)))
    SCHEMA.validate(text.decode())
    suite = ElementTree.fromstring(text)[0]
    assert suite.get("failures") == str(failures)
    assert suite.get("skipped") == str(skipped)
    assert suite.get("tests") == str(len(suite.findall("testcase")))


def test_junit_survives_characters_that_xml_cannot_hold() -> None:
    text = junit(report_of(run_of("pass"), label="--base-args '\x1b[31m & <x>'"))
    SCHEMA.validate(text.decode())


def test_the_failing_case_says_why() -> None:
    suite = ElementTree.fromstring(junit(report_of(run_of("regression"))))[0]
    failing = {
        case.get("name"): case[0].get("message") for case in suite.findall("testcase") if case.find("failure") is not None
    }
    assert failing["acceptance"].startswith("tau fell 3.10 → 2.60 (-16.1 %)")
    assert failing["verdict"] == "regression: fewer draft tokens are accepted"


def test_markdown_answers_first_and_escapes_what_would_break_a_table() -> None:
    text = markdown(report_of(run_of("regression"), label="a|b <script>"))
    assert text.startswith("## ❌ Speculative decoding gate: regression")
    assert "a\\|b &lt;script>" in text
    assert "| tau | 3.10 | 2.60 | ↓ -16.1 % | -16.1 % to -16.1 % | ±2.0 % |" in text


def test_annotations_are_workflow_commands_with_percent_signs_escaped() -> None:
    lines = github_annotations(report_of(run_of("regression")))
    assert lines[0].startswith("::error title=Speculative decoding gate::regression")
    assert any("-16.1 %25" in line for line in lines)
    assert github_annotations(report_of(run_of("pass")))[0].startswith("::notice")
    assert github_annotations(report_of(run_of("inconclusive")))[0].startswith("::warning")


def test_json_holds_verdict_and_every_turn(tmp_path: Path) -> None:
    run = run_of("regression")
    write_outputs(report_of(run), tmp_path)
    data = json.loads((tmp_path / "gate.json").read_text())
    assert data["outcome"] == "regression"
    assert data["exit_code"] == 3
    assert data["causes"] == ["acceptance"]
    assert len(data["turns"]) == 4 * len(run.blocks)
    assert {path.name for path in tmp_path.iterdir()} == {"gate.json", "gate.md", "junit.xml"}


def test_an_improvement_has_an_arrow_in_the_direction_the_value_moved() -> None:
    run = run_session(ListSource(blocks(16, slow=0.9)), Rules(), 160.0)
    row = next(line for line in markdown(report_of(run)).splitlines() if line.startswith("| step time"))
    assert "| ↓ -10.0 % | -10.0 % to -10.0 % |" in row
    assert "improved" in row
