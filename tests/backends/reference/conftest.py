from pathlib import Path

import pytest
import torch
from tiny_models import save, shape
from transformers import LlamaConfig, PreTrainedModel


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
