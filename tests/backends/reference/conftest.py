from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import PROMPTS, Build, generate, sampled_requests, save, shape
from transformers import LlamaConfig, PreTrainedModel

from backends.reference.engine import Engine
from backends.reference.options import EngineOptions
from backends.types import NEEDS_DRAFT
from tests.backends.reference.draft_heads import trained_head


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models are slower on more."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """An 8-layer random Llama: its folder, and transformers' model of it."""
    folder = tmp_path_factory.mktemp("tiny")
    return folder, save(LlamaConfig(**shape()), folder)


@pytest.fixture(scope="session")
def tiny_dir(tiny: tuple[Path, PreTrainedModel]) -> Path:
    return tiny[0]


@pytest.fixture(scope="session")
def draft_dir(tmp_path_factory: pytest.TempPathFactory, tiny: tuple[Path, PreTrainedModel]) -> Path:
    """A draft that agrees with `tiny` sometimes: the same weights, disturbed."""
    folder = tmp_path_factory.mktemp("draft")
    model = save(LlamaConfig(**shape()), folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def build(tiny_dir: Path, draft_dir: Path, heads: Callable[[str], Path]) -> Build:
    """An engine of the tiny model. Unless told otherwise `draft_model` drafts with the disturbed copy, a head is the trained one."""

    def make(variant: str = "off", k: int = 0, **fields: Any) -> Engine:
        if variant == "draft_model":
            fields.setdefault("draft", str(draft_dir))
        elif variant in NEEDS_DRAFT | {"mtp"}:
            fields.setdefault("draft", str(heads(variant)))
        settings = {"max_num_seqs": 16, "ngram_min": 1, **fields}
        return Engine(EngineOptions(tiny_dir, variant=variant, k=k, **settings))

    return make


@pytest.fixture(scope="session")
def greedy(tiny: tuple[Path, PreTrainedModel]) -> list[list[int]]:
    """What transformers generates for PROMPTS, EOS included."""
    made = []
    for prompt in PROMPTS:
        ids = tiny[1].generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, attention_mask=torch.ones(1, len(prompt))
        )
        made.append(ids[0, len(prompt) :].tolist())
    return made


@pytest.fixture(scope="session")
def sampled(tiny_dir: Path) -> list[list[int]]:
    """Without speculation, one sequence at a time, T = 0.8."""
    return generate(Engine(EngineOptions(tiny_dir, max_num_seqs=1)), sampled_requests())


@pytest.fixture(scope="session")
def heads(
    tmp_path_factory: pytest.TempPathFactory,
    tiny: tuple[Path, PreTrainedModel],
    greedy: list[list[int]],
    sampled: list[list[int]],
) -> Callable[[str], Path]:
    """Directories of heads that have learnt the greedy and the sampled texts of PROMPTS a little."""
    folder = tmp_path_factory.mktemp("heads")
    texts = [prompt + text for made in (greedy, sampled) for prompt, text in zip(PROMPTS, made, strict=True)]

    @cache
    def head(variant: str) -> Path:
        return trained_head(folder / variant, variant, *tiny, texts)

    return head
