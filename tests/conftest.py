import os
from pathlib import Path

import pytest

# Kernels are tested in Triton's interpreter. It must be chosen before anything imports Triton, as transformers does; processes
# that tests start shall not inherit the choice.
os.environ["TRITON_INTERPRET"] = "1"
import triton  # noqa: F401

del os.environ["TRITON_INTERPRET"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a context of 512 tokens."""
    from tests.checkpoints import write_llama

    return write_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def other_tokenizer_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with a tokenizer of other content."""
    from tests.checkpoints import write_llama

    text = ["zebra quartz vexing jumbled fjord waltz nymph", "lorem ipsum dolor sit amet consectetur"]
    return write_llama(tmp_path_factory.mktemp("models") / "other", text=text)
