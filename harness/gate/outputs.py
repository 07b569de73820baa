"""What a gate leaves behind: gate.json, gate.md, junit.xml, annotations of the CI system. Rendering is pure; one function writes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from backends.files import write_whole
from harness.gate.explain import number, percent, relative_change
from harness.gate.session import GateRun
from harness.gate.types import Answer, Comparison, Rules, Status

SCHEMA = 1
MARKS: Mapping[Status, str] = {"regressed": "❌", "equal": "✅", "improved": "⬆️", "unclear": "❔", "not_measured": "➖"}
OUTCOME_MARKS: Mapping[str, str] = {"pass": "✅", "regression": "❌", "inconclusive": "❔"}
QUESTIONS: Mapping[str, str] = {
    "acceptance": "acceptance",
    "step_cost": "step cost",
    "latency": "latency and throughput",
    "failures": "failures",
    "losslessness": "losslessness",
}


@dataclass(frozen=True, slots=True)
class Report:
    """A finished gate with what it compared."""

    run: GateRun
    rules: Rules
    baseline: Mapping[str, Any]  # label, and what is known of the side
    candidate: Mapping[str, Any]
    environment: Mapping[str, Any]
    created: str  # UTC, ISO 8601 without a zone: 2026-01-31T12:00:00
    budget_s: float
    method: str  # how turns were measured
    warnings: tuple[str, ...] = ()


def write_outputs(report: Report, out: Path) -> None:
    """gate.json, gate.md and junit.xml in `out`, which is made if it is missing."""
    write_whole(out / "gate.json", json.dumps(to_dict(report), indent=2, ensure_ascii=False) + "\n")
    write_whole(out / "gate.md", markdown(report))
    write_whole(out / "junit.xml", junit(report))


def to_dict(report: Report) -> dict[str, Any]:
    """The content of gate.json. `turns` holds every measured value, so that later tools need not measure again."""
    run = report.run
    return {
        "schema": SCHEMA,
        "created": report.created,
        **run.verdict.to_dict(),
        "baseline": dict(report.baseline),
        "candidate": dict(report.candidate),
        "environment": dict(report.environment),
        "rules": report.rules.to_dict(),
        "budget_s": report.budget_s,
        "elapsed_s": run.elapsed_s,
        "stopped_by": run.stopped_by,
        "method": report.method,
        "turns": [
            {
                "block": i,
                "first_in_block": block.first,
                "side": side,
                "turn": turn,
                "values": dict(sample.values),
                "requests": sample.requests,
                "failed": sample.failed,
            }
            for i, block in enumerate(run.blocks)
            for side in ("baseline", "candidate")
            for turn, sample in enumerate(getattr(block, side))
        ],
        "warnings": [*report.warnings, *run.verdict.warnings],
    }


def markdown(report: Report) -> str:
    """The summary for a job page or a pull request."""
    verdict = report.run.verdict
    lines = [
        f"## {OUTCOME_MARKS[verdict.outcome]} Speculative decoding gate: {verdict.outcome}",
        "",
        f"**{_cell(verdict.reasons[0])}**",
        *([""] + [f"- {_cell(reason)}" for reason in verdict.reasons[1:]] if verdict.reasons[1:] else []),
        "",
        f"Baseline: {_cell(str(report.baseline['label']))} · candidate: {_cell(str(report.candidate['label']))}",
        "",
        "| question | | answer |",
        "|---|---|---|",
        *(
            f"| {QUESTIONS[a.question]} | {MARKS[a.status]} {a.status.replace('_', ' ')} | {_cell(a.text)} |"
            for a in verdict.answers
        ),
        "",
    ]
    if verdict.comparisons:
        lines += [
            "| metric | baseline | candidate | change | 95 % interval | band | noise | |",
            "|---|---:|---:|---:|---:|---:|---:|---|",
            *map(_row, verdict.comparisons),
            "",
            "Change and interval are signed as the value moved; noise is the standard deviation of one block's change (two pairs).",
            "",
        ]
    warnings = [*report.warnings, *verdict.warnings]
    if warnings:
        lines += [*(f"> ⚠️ {_cell(warning)}" for warning in warnings), ""]
    lines.append(
        f"{verdict.pairs} pairs in {report.run.elapsed_s:.0f} s of {report.budget_s:.0f} s, {report.method}; "
        f"stopped by: {report.run.stopped_by}."
    )
    return "\n".join(lines) + "\n"


def _row(comparison: Comparison) -> str:
    c = comparison
    moved = c.candidate - c.baseline
    arrow = "→" if c.status == "equal" or moved == 0 else ("↑" if moved > 0 else "↓")
    cells = (
        c.label,
        number(c.baseline, c.unit),
        number(c.candidate, c.unit),
        f"{arrow} {relative_change(c)}",
        _interval(c),
        f"±{percent(c.band)}" if c.relative else f"±{c.band * 100:.1f} points",
        "" if c.noise is None else (percent(c.noise) if c.relative else f"{c.noise * 100:.1f} points"),
        f"{MARKS[c.status]} {c.status}" if c.gates else "reported only",
    )
    return f"| {' | '.join(cells)} |"


def _interval(c: Comparison) -> str:
    """The interval of the change, turned back into the direction in which the value moved."""
    if c.ci95 is None:
        return ""
    worse_is_up = (c.candidate >= c.baseline) == (c.change >= 0)
    low, high = c.ci95 if worse_is_up else (-c.ci95[1], -c.ci95[0])
    if c.relative:
        return f"{percent(low, sign=True)} to {percent(high, sign=True)}"
    return f"{low * 100:+.1f} to {high * 100:+.1f} points"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")


def junit(report: Report) -> bytes:
    """JUnit XML in the form that the schemas of Ant/JUnitReport and of Jenkins' xUnit plugin share.

    One test case for each question and one for the verdict. What regressed fails; what could not be told is skipped, so that an
    inconclusive gate is neither green nor red.
    """
    verdict = report.run.verdict
    seconds = f"{report.run.elapsed_s:.3f}"
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root, "testsuite", name="gate", package="spectune", id="0")
    suite.attrib |= {"timestamp": report.created, "hostname": "localhost", "time": seconds}
    properties = ElementTree.SubElement(suite, "properties")
    facts = {
        "outcome": verdict.outcome,
        "baseline": str(report.baseline["label"]),
        "candidate": str(report.candidate["label"]),
        "pairs": str(verdict.pairs),
        "fingerprint": str(report.environment.get("fingerprint")),
    }
    for name, value in facts.items():
        ElementTree.SubElement(properties, "property", name=name, value=_xml(value))
    for answer in verdict.answers:
        _case(suite, answer.question, "0", *_answer_result(answer, verdict.outcome))
    kind = {"pass": None, "regression": "failure", "inconclusive": "skipped"}[verdict.outcome]
    _case(suite, "verdict", seconds, kind, "\n".join(verdict.reasons))
    for attribute, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(len(suite.findall(f".//{tag}"))))
    ElementTree.SubElement(suite, "system-out").text = _xml(markdown(report))
    ElementTree.SubElement(suite, "system-err").text = _xml("\n".join([*report.warnings, *verdict.warnings]))
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True))


def _answer_result(answer: Answer, outcome: str) -> tuple[str | None, str]:
    if answer.status == "regressed" and outcome == "regression":
        return "failure", answer.text
    if answer.status == "not_measured" or (outcome == "inconclusive" and answer.status in ("unclear", "regressed")):
        return "skipped", answer.text
    return None, answer.text


def _case(suite: ElementTree.Element, name: str, seconds: str, kind: str | None, text: str) -> None:
    case = ElementTree.SubElement(suite, "testcase", name=name, classname="spectune.gate", time=seconds)
    if kind:
        result = ElementTree.SubElement(case, kind, message=_xml(text.partition("\n")[0]))
        if kind != "skipped":  # which may have no type
            result.set("type", "regression")
        result.text = _xml(text)


def _xml(text: str) -> str:
    """Without the control characters that XML 1.0 cannot hold."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


def github_annotations(report: Report) -> list[str]:
    """Workflow commands of GitHub Actions: an error for each cause, a warning for an inconclusive gate, a notice for a pass."""
    verdict = report.run.verdict
    level = {"pass": "notice", "regression": "error", "inconclusive": "warning"}[verdict.outcome]
    lines = [f"::{level} title=Speculative decoding gate::{_escape(verdict.reasons[0])}"]
    if verdict.outcome == "regression":
        regressed = [a for a in verdict.answers if a.status == "regressed"]
        lines += [f"::error title=Gate, {QUESTIONS[a.question]}::{_escape(a.text)}" for a in regressed]
    return lines


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
