import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.types import ConfigError
from harness.settings import (
    RunSettings,
    parse_base_args,
    parse_duration,
    parse_numbers,
    parse_pairs,
    parse_slo,
    parse_window,
    read_space,
)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("4", (4,)),
        ("1..3", (1, 2, 3)),
        ("1,4,16", (1, 4, 16)),
        ("16,1", (1, 16)),
        ("1..3,2,8", (1, 2, 3, 8)),
        (" 1 .. 2 ", (1, 2)),
    ],
)
def test_numbers_are_read_sorted_and_without_repeats(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_numbers("--k", text) == numbers


@pytest.mark.parametrize("text", ["", "a", "1,,2", "3..1", "-1", "1.5", "1..", "1...3"])
def test_numbers_that_cannot_be_read_name_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--k"):
        parse_numbers("--k", text)


@given(st.text(max_size=20))
def test_any_text_is_numbers_or_one_clear_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        numbers = parse_numbers("--k", text)
        assert list(numbers) == sorted(set(numbers))
        assert min(numbers) >= 0


@pytest.mark.parametrize(("text", "seconds"), [("500ms", 0.5), ("90", 90.0), ("30m", 1800.0), ("1.5h", 5400.0), ("2 s", 2.0)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration("--budget", text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["0s", "-5m", "soon", "5d", ""])
def test_durations_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="--budget"):
        parse_duration("--budget", text)


def test_slo_is_seconds_by_metric() -> None:
    assert parse_slo("ttft_p95=500ms,tpot_p95=40ms") == {"ttft_p95": 0.5, "tpot_p95": 0.04}


def test_pairs_refuse_a_name_given_twice() -> None:
    with pytest.raises(ConfigError, match="'a' is given twice"):
        parse_pairs("--draft", ["a=1", "a=2"])


def test_window_must_run_forwards() -> None:
    assert parse_window("0-300") == (0.0, 300.0)
    with pytest.raises(ConfigError, match="--window"):
        parse_window("300-0")


def settings(**changes: object) -> RunSettings:
    return RunSettings(traces=("t.jsonl",), out="o", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": ("off", "eagle9")}, "--variants: unknown 'eagle9'; choose from off, ngram"),
        ({"backends": ("llamacpp",)}, "--backend: unknown 'llamacpp'"),
        ({"variants": ("draft_model",), "model": "org/target"}, "draft_model=ID_OR_PATH"),
        ({"drafts": {"ngram": "x"}}, "'ngram' is no variant that takes a draft"),
        ({"batch_sizes": (1, 128)}, "128 is above --max-num-seqs 64"),
        ({"k": (0, 2)}, "--k"),
        ({"slo": {"latency": 1.0}}, "--slo: unknown 'latency'"),
        ({"time_scale": 0.0}, "--time-scale"),
        ({"quantization": ("int3",)}, "reference has no 'int3'"),
        ({"executor": "slurm"}, "--executor: unknown 'slurm'; choose from local, ray"),
        ({"ray_address": "host:6379"}, "--ray-address: add --executor ray"),
        ({"executor": "local", "endpoints": {"off": "http://a"}}, "--executor: servers named by --endpoint run already"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings(**changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_production_flags_belong_to_their_backend() -> None:
    assert parse_base_args(["--max-model-len 4096 --json-arg=a"], ["vllm"]) == {
        "vllm": ("--max-model-len", "4096", "--json-arg=a")
    }
    two = parse_base_args(["vllm=--enforce-eager", "sglang=--device cpu"], ["vllm", "sglang"])
    assert two == {"vllm": ("--enforce-eager",), "sglang": ("--device", "cpu")}
    assert parse_base_args([""], ["reference", "vllm"]) == {}


@pytest.mark.parametrize(
    ("item", "message"), [("--enforce-eager", "whose flags"), ("sglang=--device cpu", "add --backend sglang")]
)
def test_production_flags_of_nobody_are_refused(item: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_base_args([item], ["reference", "vllm"])


def test_the_grid_comes_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "space.yaml"
    file.write_text("variants: [off, ngram]\nk: 1..3\nbatch_sizes: [1, 8]\nquantization: none\n")
    assert read_space(file) == {"variants": ("off", "ngram"), "k": (1, 2, 3), "batch_sizes": (1, 8), "quantization": ("none",)}


@pytest.mark.parametrize(
    ("text", "message"),
    [("depth: 3", "'depth' is no axis"), ("k: many", "'many' is no number"), ("- k", "got list"), ("k: [", "while parsing")],
)
def test_a_file_that_is_no_grid_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "space.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_space(file)
    assert "\n" not in str(error.value)
