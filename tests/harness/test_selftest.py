from pathlib import Path

import pytest

from harness.selftest import Check, keep, kept, selftest

FINGERPRINT = "sha256:" + "ab" * 32


def test_what_was_found_on_a_machine_is_known_later_and_on_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept(FINGERPRINT) is None
    found = keep([Check("TTFT p50", "20.1 ms", "20.0 ms", "1 ms", True)], FINGERPRINT)
    assert kept(FINGERPRINT) == found
    assert found["checks"][0]["passed"]
    assert kept("sha256:" + "cd" * 32) is None


@pytest.mark.slow
def test_every_fault_is_classified_and_every_count_exact() -> None:
    """Times are left to `tune.py selftest` by hand: here other work may run beside."""
    checks = [check for check in selftest() if check.limit is None and "load is valid" not in check.name]
    assert len(checks) == 2 * 2 + 16
    assert [check for check in checks if not check.passed] == []
