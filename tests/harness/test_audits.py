"""Who is compared with whom: several finalists answer before their off does."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backends.types import BackendError, Endpoint, ServingConfig
from harness import audits
from harness.answers import Output
from harness.audits import LosslessnessAudit
from harness.store import RunStore
from workloads.types import Request

OFF = ServingConfig("reference", "m")
SOUND, BROKEN = (ServingConfig("reference", "m", "ngram", k=k) for k in (2, 4))
REQUESTS = [Request(index=i, arrival_s=None, prompt="p", sampling={"temperature": 0}) for i in range(16)]


class FakeLab:
    """Servers by configuration; counts how often each is asked."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.progress = SimpleNamespace(note=self.notes.append)
        self.asked: list[tuple[str, int]] = []
        self.down: set[ServingConfig] = set()

    def look(self, config: ServingConfig, function: Callable[[Endpoint], Any]) -> Any:
        if config in self.down:
            raise BackendError("it does not start")
        return function(Endpoint(config.label(), "m", "reference"))


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> FakeLab:
    lab = FakeLab()

    def ask_all(endpoint: Endpoint, requests: Sequence[Request], *, at_once: int, **_: Any) -> dict[int, Output]:
        lab.asked.append((endpoint.base_url, at_once))
        shift = 1 if endpoint.base_url == BROKEN.label() else 0
        return {r.index: Output("text", tuple(range(shift, 20 + shift)), "length", (3.0,) * 20) for r in requests}

    monkeypatch.setattr(audits, "ask_all", ask_all)
    return lab


def audit_of(lab: FakeLab, folder: Path) -> LosslessnessAudit:
    return LosslessnessAudit(lab, RunStore(folder), {"t": REQUESTS}, seed=0)  # type: ignore[arg-type]


def test_each_finalist_is_compared_with_its_own_answers(lab: FakeLab, tmp_path: Path) -> None:
    audit = audit_of(lab, tmp_path)
    for config in (SOUND, BROKEN):
        audit.on(config)
    for config in (SOUND, BROKEN):
        audit.off(config)
    verdicts = {entry["config"]["k"]: entry["verdict"] for entry in audit.result()}
    assert verdicts == {2: "identical", 4: "differs"}
    assert lab.asked.count((OFF.label(), audits.CONTROL_AT_ONCE)) == 1  # off answers once for all its finalists
    assert lab.asked.count((OFF.label(), audits.AT_ONCE)) == 1


def test_what_was_found_is_not_asked_again_in_a_resumed_run(lab: FakeLab, tmp_path: Path) -> None:
    first = audit_of(lab, tmp_path)
    first.on(SOUND)
    first.off(SOUND)
    first._lab.asked.clear()  # type: ignore[attr-defined]
    (tmp_path / ".lock").unlink()
    again = audit_of(lab, tmp_path)
    again.on(SOUND)
    again.off(SOUND)
    assert lab.asked == []
    assert again.result() == first.result()
    assert "text" not in {key for entry in again.result() for key in entry}


def test_a_server_that_does_not_start_is_a_note_and_no_entry(lab: FakeLab, tmp_path: Path) -> None:
    lab.down.add(SOUND)
    audit = audit_of(lab, tmp_path)
    audit.on(SOUND)
    audit.off(SOUND)
    assert audit.result() == []
    assert lab.notes == ["  losslessness of ngram K=2 on t was not looked at: it does not start"]
