"""The command line as a user meets it: each case a real process, its exit code and its one line on stderr."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GOOD_ROW = {"arrival_s": 0.0, "prompt": "Count to three.", "max_tokens": 4}


def tune(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tune.py"), *arguments], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


def refused(where: Path, *arguments: str) -> str:
    """Run, expect exit code 2, one line on stderr and nothing written; returns the line."""
    before = sorted(where.rglob("*"))
    result = tune(*arguments, cwd=where)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    assert sorted(where.rglob("*")) == before
    return lines[0]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "good.jsonl"
    path.write_text("".join(json.dumps({**GOOD_ROW, "arrival_s": float(i)}) + "\n" for i in range(20)))
    return path


def test_help_names_the_main_job_and_every_command(tmp_path: Path) -> None:
    result = tune("--help", cwd=tmp_path)
    assert result.returncode == 0
    for word in ("--trace", "--batch-sizes", "inspect", "report", "serve", "preflight", "gate", "selftest", "verify-engine"):
        assert word in result.stdout


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "nowhere.jsonl" in refused(tmp_path, "--trace", "nowhere.jsonl")


def test_an_empty_trace_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    assert "empty.jsonl" in refused(tmp_path, "--trace", "empty.jsonl")


def test_a_line_that_is_not_json_is_named_by_its_number(tmp_path: Path, trace: Path) -> None:
    lines = trace.read_text().splitlines()
    lines[16] = '{"arrival_s": 1.0, "prompt": '
    trace.write_text("\n".join(lines) + "\n")
    assert "good.jsonl:17" in refused(tmp_path, "--trace", "good.jsonl")


def test_an_unknown_variant_lists_the_known_ones(tmp_path: Path, trace: Path) -> None:
    line = refused(tmp_path, "--trace", trace.name, "--variants", "off,eagle9")
    assert "eagle9" in line
    assert "ngram" in line


def test_a_model_directory_without_weights_is_named(tmp_path: Path, trace: Path, tiny_model: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (bare / name).write_bytes((tiny_model / name).read_bytes())
    line = refused(tmp_path, "--trace", trace.name, "--model", "bare")
    assert "bare" in line
    assert "safetensors" in line


def test_a_prompt_longer_than_the_context_is_named_by_its_line(tmp_path: Path, trace: Path, tiny_model: Path) -> None:
    with open(trace, "a") as rows:
        rows.write(json.dumps({"arrival_s": 30.0, "prompt": "word " * 5000, "max_tokens": 4}) + "\n")
    line = refused(tmp_path, "--trace", trace.name, "--model", str(tiny_model))
    assert "good.jsonl:21" in line
    assert "context" in line


def test_a_draft_with_another_tokenizer_ends_the_run_before_any_start(
    tmp_path: Path, trace: Path, tiny_model: Path, other_tokenizer_model: Path
) -> None:
    options = ("--variants", "off,draft_model", "--draft", f"draft_model={other_tokenizer_model}")
    line = refused(tmp_path, "--trace", trace.name, "--model", str(tiny_model), *options)
    assert "tokenizer" in line


def test_serving_on_a_port_in_use_says_so(tmp_path: Path, tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = tune("serve", "--model", str(tiny_model), "--port", port, cwd=tmp_path)
    assert result.returncode == 2
    assert port in result.stderr
    assert "Traceback" not in result.stderr


def test_a_plan_starts_and_writes_nothing(tmp_path: Path, trace: Path, tiny_model: Path) -> None:
    result = tune("--trace", trace.name, "--model", str(tiny_model), "--plan", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "server starts" in result.stdout
    assert "estimate" in result.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["good.jsonl"]


LENGTHS = ROOT / "tests" / "data" / "traces" / "BurstGPT_1.head400.csv"


def test_a_trace_of_lengths_asks_for_prompts_and_runs_with_them(tmp_path: Path, tiny_model: Path) -> None:
    assert "--prompts" in refused(tmp_path, "--trace", str(LENGTHS), "--model", str(tiny_model))
    options = ("--limit", "8", "--prompts", "chat", "--max-output-tokens", "8", "--plan")
    result = tune("--trace", str(LENGTHS), "--model", str(tiny_model), *options, cwd=tmp_path)
    assert result.returncode in (0, 2)  # the tiny model's context may be too short for a recorded prompt, which is said
    assert "Traceback" not in result.stderr


def test_inspect_prints_a_profile_and_plain_data(tmp_path: Path) -> None:
    shown = tune("inspect", str(LENGTHS), cwd=tmp_path)
    assert "400 read" in shown.stdout
    data = json.loads(tune("inspect", str(LENGTHS), "--json", cwd=tmp_path).stdout)
    assert data["summary"]["read"] == data["summary"]["kept"] + sum(data["summary"]["dropped"].values()) == 400


def test_a_scrubbed_trace_holds_no_text(tmp_path: Path, trace: Path) -> None:
    assert tune("inspect", trace.name, "--scrub", "shared.jsonl", cwd=tmp_path).returncode == 0
    scrubbed = (tmp_path / "shared.jsonl").read_text()
    assert len(scrubbed.splitlines()) >= 20
    assert "Count to three" not in scrubbed


def test_preflight_names_another_tokenizer_and_exits_1(tmp_path: Path, tiny_model: Path, other_tokenizer_model: Path) -> None:
    right = tune("preflight", "--model", str(tiny_model), "--backend", "reference", cwd=tmp_path)
    assert right.returncode == 0, right.stderr
    draft = f"draft_model={other_tokenizer_model}"
    wrong = tune("preflight", "--model", str(tiny_model), "--backend", "reference", "--draft", draft, cwd=tmp_path)
    assert wrong.returncode == 1
    assert "tokenizer" in wrong.stdout


def test_preflight_lists_the_published_drafts_of_a_target_that_is_not_here(tmp_path: Path) -> None:
    done = tune("preflight", "--model", "meta-llama/Llama-3.3-70B-Instruct", cwd=tmp_path)
    assert done.returncode == 0
    assert "--draft eagle3=yuhuili/EAGLE3-LLaMA3.3-Instruct-70B" in done.stdout


def test_verify_engine_asks_every_question_of_every_configuration(tmp_path: Path, tiny_model: Path) -> None:
    done = tune("verify-engine", "reference", "--model", str(tiny_model), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for question in ("tau from counters is tau from streams", "greedy text is off's", "ends with all its processes"):
        assert question in " ".join(done.stdout.split())
    assert "14 of 14 checks passed" in done.stdout
