import math
from pathlib import Path

import pytest
import torch

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


def test_a_model_against_itself_loses_nothing_and_int4_loses_something(tiny_dir: Path) -> None:
    prompts = [{"prompt": "one two three one two"}, {"prompt": "four"}]
    found = measure(tiny_dir, prompts, baseline="none", others=["none", "int4"], max_tokens=8)
    assert found["none"].greedy_agreement == 1.0
    assert found["none"].mean_kl == pytest.approx(0.0, abs=1e-9)
    assert found["int4"].mean_kl > 0
    assert found["int4"].tokens == found["none"].tokens
