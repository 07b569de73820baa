import math
from pathlib import Path

import pytest
import torch

from backends.reference.options import EngineOptions
from backends.reference.quality import compare, measure


def test_agreement_and_kl_of_known_distributions() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    q = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]).log()
    found = compare([p], [q])
    assert found.tokens == 2
    assert found.greedy_agreement == 0.5
    # KL of the first row: 0.5 log 2 + 0.25 log 0.5 = 0.25 log 2; the second row agrees.
    assert found.mean_kl == pytest.approx(0.25 * math.log(2) / 2)


def test_positions_are_pooled_over_texts_of_different_length() -> None:
    same = torch.tensor([[2.0, 1.0]])
    other = torch.tensor([[1.0, 2.0]])
    found = compare([same.expand(3, 2), same], [same.expand(3, 2), other])
    assert found.greedy_agreement == 0.75


def test_a_model_against_itself_loses_nothing_and_what_is_quantized_loses_something(tiny_dir: Path) -> None:
    prompts = [{"prompt": "one two three one two"}, {"prompt": "four"}]
    plain, int8_cache = EngineOptions(tiny_dir), EngineOptions(tiny_dir, kv_cache_dtype="int8")
    others = [plain, EngineOptions(tiny_dir, quantization="int4"), int8_cache, EngineOptions(tiny_dir, kv_cache_dtype="fp8")]
    same, *lossy = measure(prompts, baseline=plain, others=others, max_tokens=8)
    assert same.greedy_agreement == 1.0
    assert same.mean_kl == pytest.approx(0.0, abs=1e-9)
    weights, int8, fp8 = (found.mean_kl for found in lossy)
    assert weights > fp8 > int8 > 1e-7
    assert {found.tokens for found in lossy} == {same.tokens}
    (same,) = measure(prompts, baseline=int8_cache, others=[int8_cache], max_tokens=8)
    assert same.mean_kl == pytest.approx(0.0, abs=1e-9)
