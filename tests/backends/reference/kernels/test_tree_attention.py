"""The kernel, run by Triton's interpreter, gives what the torch path gives: odd sizes, trees and chains, poisoned memory."""

import pytest
import torch
from tiny_models import PROMPTS, Build, generate, request

from backends.reference import kernels
from backends.reference.options import KV_CACHE_DTYPES
from benchmarks.kernel_checks import CASES, TOLERANCE, attention_error

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")  # of rows that pad a tile


@pytest.mark.parametrize("stored", KV_CACHE_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_the_torch_path(name: str, dtype: torch.dtype, stored: str) -> None:
    assert attention_error(CASES[name], dtype, torch.device("cpu"), stored) < TOLERANCE[dtype]


@pytest.mark.parametrize(("variant", "fields"), [("off", {}), ("eagle3", {"k": 3, "topk": 3, "num_draft_tokens": 8})])
def test_engine_on_kernels_generates_what_transformers_does(
    variant: str, fields: dict[str, int], build: Build, greedy: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three prompts of different length; the last one is in prefill, in chunks, while the others decode."""
    monkeypatch.setattr(kernels, "usable", lambda device: True)
    engine = build(variant, max_num_seqs=3, max_num_batched_tokens=40, **fields)
    texts = generate(engine, [request(prompt, 8) for prompt in PROMPTS[:3]])
    assert texts == [text[:8] for text in greedy[:3]]


@pytest.mark.parametrize("stored", ["fp8", "int8"])
def test_engine_on_kernels_reads_a_quantized_cache_as_the_torch_path_does(
    stored: str, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tree drafter, whose own cache is quantized as well."""
    fields = {
        "kv_cache_dtype": stored,
        "k": 3,
        "topk": 3,
        "num_draft_tokens": 8,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 40,
    }
    requests = [request(prompt, 8) for prompt in PROMPTS[:3]]
    expected = generate(build("eagle3", **fields), requests)
    monkeypatch.setattr(kernels, "usable", lambda device: True)
    assert generate(build("eagle3", **fields), requests) == expected
