from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No gate of a test learns from another's noise, or leaves any in the user's cache."""
    monkeypatch.setattr("harness.gate.noise.cache_folder", lambda kind: tmp_path / "cache" / kind)
