"""`benchmarks/engine_gpu.py` runs on a CPU in miniature; what it says about time there means nothing, the rest must be right."""

import json
from pathlib import Path

import pytest
import torch

from backends.reference.config import read_config
from benchmarks import engine_gpu
from benchmarks.random_checkpoints import SMALL_TARGET, write_target


def test_the_whole_benchmark_in_miniature(tiny_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "engine_gpu.json"
    engine_gpu.main(["--device", "cpu", "--small", "--model", str(tiny_model), "--out", str(out)])
    report = json.loads(out.read_text())
    assert report["device"] == "cpu"
    assert report["environment"]["host"]["cpu"]
    assert "not run" in report["kernels"]
    assert report["equality"] == {label: {"equal": 2, "of": 2} for label in ("off", "ngram K=4", "draft_model K=4")}
    for name, labels in (
        ("demo", ["off", "ngram K=2", "draft_model K=2", "off"]),
        ("large", ["off", "ngram K=2", "eagle3 K=2", "eagle3 K=2 tree of 16", "draft_model K=2", "off"]),
    ):
        rows = report[name]
        assert [(row["label"], row["batch"]) for row in rows] == [(label, batch) for label in labels for batch in (1, 3)]
        for row in rows:
            assert 1 <= row["tau"] <= (row["k"] + 1)
            assert row["tau"] == 1 or row["k"]
            assert row["tokens_per_s"] > 0
            assert row["step_s"] > 0
        assert [row["speed_up"] for row in rows[:2]] == [1, 1]
    # what is accepted is a coin of the request's seed and the position, whoever drafts
    forced = [row["tau"] for row in report["large"] if row["k"]]
    assert forced == forced[:2] * 4
    assert max(forced) > 1


def test_roofline_is_reading_at_one_row_and_computing_at_many(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "model", SMALL_TARGET, tokenizer=tmp_path, device=torch.device("cpu"))
    config = read_config(folder)
    # 64 wide, 4 heads and 2 KV heads of 16, 128 inner, 8 layers, 512 tokens
    weights = 8 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128) + 512 * 64
    kv = 8 * 2 * 2 * 16 * 2  # bytes a token: layers, K and V, heads, dim, bf16
    slow_reads = {"read_bytes_per_s": 1e6, "matmul_flop_per_s": 1e15}
    assert engine_gpu.roofline(config, torch.bfloat16, 3, 4, 100, slow_reads) == pytest.approx((2 * weights + 300 * kv) / 1e6)
    slow_products = {"read_bytes_per_s": 1e15, "matmul_flop_per_s": 1e9}
    assert engine_gpu.roofline(config, torch.bfloat16, 3, 4, 100, slow_products) == pytest.approx(2 * weights * 15 / 1e9)


def test_a_gpu_that_is_not_there_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as raised:
        engine_gpu.main([])
    assert raised.value.code == 2
    assert "torch sees no GPU" in capsys.readouterr().err
