"""Heads that come with the project: small in the package, whole in the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backends.reference import demo_heads
from backends.reference.heads.export import published, write_small
from backends.reference.heads.files import read_target
from backends.reference.heads.load import load_head
from backends.reference.training.trainees import build, finished, shape_of
from backends.types import ConfigError
from harness.job import resolve_drafts
from harness.settings import RunSettings
from tests.backends.reference.heads import published as p


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a random Medusa head for a tiny demo model, and an empty cache."""
    model = p.target(tmp_path / "model")
    target = read_target(model, torch.float32)
    ids, scale = torch.arange(0, 200, 2), torch.ones(3 * p.H)
    state = finished(build("medusa", target, ids, scale), scale)
    write_small(tmp_path / "shipped" / "medusa", published("medusa", state, shape_of(target.config), ids, target, 0))
    monkeypatch.setattr(demo_heads, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(demo_heads, "demo_model_dir", lambda: model)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return model


def test_a_shipped_head_is_written_out_whole_once(shipped: Path) -> None:
    folder = demo_heads.demo_head_dir("medusa")
    target = read_target(shipped, torch.float32)
    loaded = load_head(folder, target, "medusa")
    torch.testing.assert_close(loaded.head.heads[0].weight, target.output[::2][:100].to(torch.bfloat16).float())
    assert not any("target's rows" in note for note in loaded.notes)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert demo_heads.demo_head_dir("medusa") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [path for path in folder.parent.iterdir() if path.is_dir()] == [folder]


def test_the_demo_model_drafts_with_its_shipped_heads_unasked(shipped: Path) -> None:
    settings = RunSettings(
        traces=("t.jsonl",), out="o", variants=("off", "ngram", "medusa", "draft_model"), drafts={"draft_model": "self-int4"}
    )
    drafts = resolve_drafts(settings)
    assert drafts == {"draft_model": "self-int4", "medusa": str(demo_heads.demo_head_dir("medusa"))}
    elsewhere = RunSettings(traces=("t.jsonl",), out="o", model="m", variants=("off", "medusa"), drafts={"medusa": "x"})
    assert resolve_drafts(elsewhere) == {"medusa": "x"}


def test_a_head_that_is_not_shipped_is_an_error_that_lists_those_that_are(shipped: Path) -> None:
    with pytest.raises(ConfigError, match="no eagle3 head for the demo model is shipped: there are medusa"):
        demo_heads.demo_head_dir("eagle3")
