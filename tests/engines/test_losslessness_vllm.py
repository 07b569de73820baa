"""The losslessness audit on the real vLLM server with a real model: identical in float32, within the control in bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_server import ENV, FLAGS, python

from backends.reference.demo_model import demo_model_dir
from backends.types import ServingConfig
from tests.audited import audited, prompts

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("dtype", "verdicts"),
    [
        ("float32", {"identical"}),
        pytest.param("bfloat16", {"identical", "within_control"}, marks=pytest.mark.slow),
    ],
)
def test_ngram_is_identical_in_float32_and_within_the_control_in_bf16(dtype: str, verdicts: set[str], tmp_path: Path) -> None:
    extra = {**FLAGS, "dtype": dtype, "env": ENV}
    settings = ServingConfig("vllm", str(demo_model_dir()), "ngram", k=4, max_num_seqs=16, extra=extra)
    found = audited(settings, prompts("grounded", "chat", each=8), tmp_path, command=(python(),))
    assert found["verdict"] in verdicts, found
