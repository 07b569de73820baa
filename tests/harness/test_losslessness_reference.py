"""The losslessness audit on the real reference engine: what is exact is identical, rounding is within the control, a cheat differs."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from backends.reference.demo_model import demo_model_dir
from backends.types import ServingConfig
from tests.audited import audited, prompts
from tests.checkpoints import write_llama
from workloads.types import Request

LOOPS = [
    Request(index=i, arrival_s=None, prompt=f"again and again and again number {i} again and again", max_tokens=32)
    for i in range(16)
]


def ngram(model: Path, **extra: str) -> ServingConfig:
    return ServingConfig("reference", str(model), "ngram", k=4, max_num_seqs=8, extra=extra)


@pytest.fixture(scope="module")
def fickle_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that says what is least like what it just said, so that its loops break off and drafts go wrong."""
    folder = write_llama(tmp_path_factory.mktemp("models") / "fickle")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = -weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_exact_engine_in_float32_is_identical(fickle_model: Path, tmp_path: Path) -> None:
    found = audited(ngram(fickle_model, dtype="float32"), LOOPS, tmp_path)
    assert (found["verdict"], found["exact_match_share"], found["control_exact_match_share"]) == ("identical", 1.0, 1.0)


def test_drafts_that_are_accepted_unseen_differ(fickle_model: Path, tmp_path: Path) -> None:
    found = audited(ngram(fickle_model, dtype="float32", forced_acceptance="0.9,0.8,0.7,0.6"), LOOPS, tmp_path)
    assert found["verdict"] == "differs"
    assert found["exact_match_share"] < 0.5


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("dtype", "verdicts"), [("float32", {"identical"}), ("bfloat16", {"identical", "within_control"})])
def test_the_demo_model_is_identical_in_float32_and_within_the_control_in_bf16(
    dtype: str, verdicts: set[str], tmp_path: Path
) -> None:
    found = audited(ngram(demo_model_dir(), dtype=dtype), prompts("grounded", "chat", each=8), tmp_path)
    assert found["verdict"] in verdicts, found
    assert found["requests"] == 16
