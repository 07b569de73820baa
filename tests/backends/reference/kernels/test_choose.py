"""The kernel, run by Triton's interpreter, chooses the tokens that the torch path chooses."""

import pytest
import torch

from backends.reference import kernels
from backends.reference.kernels import choose as kernel
from backends.reference.sampling import DRAFT, TARGET, Sampling, choose

KINDS = (
    Sampling(),
    Sampling(0.8, seed=5),
    Sampling(1.3, seed=(1 << 63) - 1),
    Sampling(0.7, top_k=20, seed=7),
    Sampling(1.0, top_p=0.9, seed=8),
)


@pytest.mark.parametrize("stream", [TARGET, DRAFT])
@pytest.mark.parametrize("vocab", [1, 63, 64, 1001])
def test_tokens_equal_the_torch_path(vocab: int, stream: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabularies below, at and above a block, rows apart in memory with NaN between them."""
    monkeypatch.setattr(kernel, "BLOCK", 64)
    logits = torch.full((40, vocab + 3), torch.nan)
    logits[:, :vocab] = 3 * torch.randn(40, vocab, generator=torch.Generator().manual_seed(0))
    rows = [(KINDS[i % len(KINDS)], i) for i in range(40)]
    expected = choose(logits[:, :vocab], rows, stream)
    monkeypatch.setattr(kernels, "usable", lambda device: True)
    assert choose(logits[:, :vocab], rows, stream) == expected


def test_of_equal_scores_the_first_is_taken() -> None:
    logits = torch.zeros(2, 9000)
    logits[0, 70] = logits[0, 8999] = 2
    keys, greedy = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2)
    assert kernel.choose_rows(logits, greedy, keys).tolist() == [70, 0]
