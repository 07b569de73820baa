"""The prompts that the shipped heads are trained on are nobody's test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backends.reference.training.prompts import main

ROOT = Path(__file__).resolve().parents[4]


def prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    for name in ("gsm8k", "self_instruct"):
        row = {"prompt": f"a question of {name}", "category": "x"}
        (tmp_path / name).write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    main(str(tmp_path / "gsm8k"), str(tmp_path / "self_instruct"))
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_prompts_are_distinct_and_the_same_each_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = prompts(tmp_path, capsys)
    assert made == prompts(tmp_path, capsys)
    texts = [row["prompt"] for row in made]
    assert len(set(texts)) == len(texts) > 2000
    assert {row["category"] for row in made} == {"math", "instruction", "chat", "code", "grounded"}
    assert sum(text == "a question of gsm8k" for text in texts) == 1


def test_no_bundled_trace_or_pool_shares_a_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundled = set()
    for path in [*(ROOT / "workloads" / "pools").glob("*.jsonl"), ROOT / "workloads" / "samples" / "demo.jsonl"]:
        for line in path.read_text().splitlines():
            bundled |= {message["content"].strip() for message in json.loads(line)["messages"]}
    assert len(bundled) > 400
    for row in prompts(tmp_path, capsys):
        text = row["prompt"].strip()
        assert text not in bundled
        assert not any(text in other for other in bundled if len(text) > 40)
