"""A shared study in a real PostgreSQL server that goes away and comes back."""

import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest

from backends.types import BackendError, ConfigError
from harness.search import Cell, cells_of, open_storage, open_study, search
from tests.harness.test_search import space, value

PROGRAMS = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)
pytestmark = pytest.mark.skipif(PROGRAMS is None, reason="needs PostgreSQL's server programs")


class Postgres:
    def __init__(self, folder: Path) -> None:
        self.data = folder / "data"
        self.user = "postgres" if os.getuid() == 0 else None  # PostgreSQL refuses to run as root
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        if self.user:
            shutil.chown(folder, self.user)
        self._run("initdb", "-D", str(self.data), "-U", "postgres", "--auth=trust", "--no-sync")

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self.data} -c fsync=off"
        self._run("pg_ctl", "-D", str(self.data), "-w", "-l", str(self.data / "log"), "-o", options, "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self.data), "-m", "immediate", "stop")

    def _run(self, program: str, *arguments: str) -> None:
        assert PROGRAMS is not None
        command = [str(PROGRAMS / program), *arguments]
        subprocess.run(command, check=True, user=self.user, stdout=subprocess.DEVNULL, timeout=60, cwd="/")


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server = Postgres(Path(folder))
        server.start()
        yield server
        server.stop()


def test_a_search_waits_for_a_database_that_restarts_and_counts_nothing_twice(postgres: Postgres, tmp_path: Path) -> None:
    measured: list[Cell] = []

    def measure(cell: Cell) -> tuple[float, ...]:
        if len(measured) in (3, 8):
            postgres.stop()
            threading.Timer(1.5, postgres.start).start()
        measured.append(cell)
        return value(cell)

    study = open_study(cells_of(space()), open_storage(postgres.url, tmp_path), strategy="tpe", seed=1, objectives=1)
    assert search(space(), measure, study, strategy="tpe") == 16
    assert len(set(measured)) == 16
    states = [t.state.name for t in study._study.get_trials(deepcopy=False)]
    assert states.count("COMPLETE") == 16
    assert set(states) <= {"COMPLETE", "FAIL"}


def test_a_search_goes_on_after_the_database_was_gone_and_counts_nothing_twice(
    postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.search.PATIENCE_S", 1.0)

    def run(stop_at: int | None) -> None:
        measured: list[Cell] = []

        def measure(cell: Cell) -> tuple[float, ...]:
            if len(measured) == stop_at:
                postgres.stop()  # without a word, in the middle of a trial
            measured.append(cell)
            return value(cell)

        study = open_study(cells_of(space()), open_storage(postgres.url, tmp_path), strategy="tpe", seed=1, objectives=1)
        search(space(), measure, study, strategy="tpe")

    with pytest.raises(BackendError, match="has not answered for 1 s"):
        run(stop_at=5)
    postgres.start()
    storage = open_storage(postgres.url, tmp_path)
    (summary,) = optuna.get_all_study_summaries(storage)
    study = optuna.load_study(study_name=summary.study_name, storage=storage)
    (lost,) = study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.RUNNING])
    storage.set_trial_user_attr(
        lost._trial_id, "owner", {**lost.user_attrs["owner"], "started": 1.0}
    )  # as if that process had died
    run(stop_at=None)
    states = [t.state.name for t in study.get_trials(deepcopy=False)]
    assert states.count("COMPLETE") == 16
    assert "RUNNING" not in states


def test_a_database_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--storage 127\.0\.0\.1:1/none: "):
        open_storage("postgresql+psycopg://me:secret@127.0.0.1:1/none", tmp_path)
