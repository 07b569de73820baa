"""Kernels are run by Triton's interpreter here; `tests/conftest.py` has imported Triton itself for it."""

import pytest

with pytest.MonkeyPatch.context() as environment:
    environment.setenv("TRITON_INTERPRET", "1")
    import backends.reference.kernels.choose
    import backends.reference.kernels.int4_linear
    import backends.reference.kernels.tree_attention  # noqa: F401


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
