import itertools
import math
from pathlib import Path

import optuna
import pytest

from backends.types import ServingConfig
from harness.search import Cell, open_storage, search
from harness.space import Space


def space(ks: range = range(1, 5), batches: tuple[int, ...] = (1, 4)) -> Space:
    off = ServingConfig(backend="reference", model="m")
    on = [ServingConfig(backend="reference", model="m", variant=v, k=k) for v in ("ngram", "suffix") for k in ks]
    return Space((off,), tuple(on), (), batches)


def value(cell: Cell) -> tuple[float, ...]:
    """A smooth truth with one best cell: suffix at K 3, better at batch 1."""
    return (abs(cell.config.k - 3) * 0.1 + (cell.config.variant == "ngram") * 0.2 + math.log(cell.batch_size) * 0.1,)


def run(where: Path, visited: list[Cell], strategy: str, of: Space | None = None, **options: int) -> int:
    def measure(cell: Cell) -> tuple[float, ...]:
        visited.append(cell)
        return value(cell)

    return search(
        of or space(),
        measure,
        strategy=strategy,
        seed=1,
        objectives=1,
        storage=open_storage(None, where),
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("strategy", ["grid", "random", "funnel"])
def test_every_cell_is_measured_once_and_only_once(tmp_path: Path, strategy: str) -> None:
    visited: list[Cell] = []
    assert run(tmp_path, visited, strategy) == 16
    assert len(visited) == len(set(visited)) == 16


@pytest.mark.parametrize("strategy", ["grid", "funnel"])
def test_a_server_is_not_started_twice(tmp_path: Path, strategy: str) -> None:
    visited: list[Cell] = []
    run(tmp_path, visited, strategy)
    starts = [config for config, _ in itertools.groupby(visited, key=lambda cell: cell.config)]
    assert len(starts) == len(set(starts)) == 8


def test_max_cells_bounds_the_search(tmp_path: Path) -> None:
    visited: list[Cell] = []
    assert run(tmp_path, visited, "random", max_cells=5) == 5
    assert len(visited) == 5


def test_the_funnel_finds_the_best_of_a_large_space_in_a_third_of_it(tmp_path: Path) -> None:
    visited: list[Cell] = []
    large = space(range(1, 13), (1, 2, 4, 8))
    assert run(tmp_path, visited, "funnel", large) == 32
    best = min(visited, key=value)
    assert (best.config.variant, best.config.k, best.batch_size) == ("suffix", 3, 1)


def test_a_failed_cell_is_told_as_a_failure_and_never_as_a_number(tmp_path: Path) -> None:
    storage = open_storage(None, tmp_path)
    search(
        space(),
        lambda cell: None if cell.config.variant == "ngram" else value(cell),
        strategy="grid",
        seed=0,
        objectives=1,
        storage=storage,
    )
    (summary,) = optuna.get_all_study_summaries(storage)
    study = optuna.load_study(study_name=summary.study_name, storage=storage)
    states = [t.state for t in study.get_trials(deepcopy=False) if t.params["variant"] == "ngram"]
    assert states == [optuna.trial.TrialState.FAIL] * 8
    assert study.best_trial.params["variant"] == "suffix"


def test_a_torn_journal_is_cut_to_its_last_whole_line_and_the_study_goes_on(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    visited: list[Cell] = []

    def measure(cell: Cell) -> tuple[float, ...]:
        if len(visited) == 3:
            raise Killed
        visited.append(cell)
        return value(cell)

    with pytest.raises(Killed):
        search(space(), measure, strategy="grid", seed=1, objectives=1, storage=open_storage(None, tmp_path))
    with open(tmp_path / "study.journal", "ab") as journal:
        journal.write(b'{"op_code": 4, "worker_id": "half a li')
    again: list[Cell] = []
    run(tmp_path, again, "grid")
    assert len(set(again)) == 16
    storage = open_storage(None, tmp_path)
    (summary,) = optuna.get_all_study_summaries(storage)
    states = [t.state for t in optuna.load_study(study_name=summary.study_name, storage=storage).get_trials(deepcopy=False)]
    assert optuna.trial.TrialState.RUNNING not in states
    assert states.count(optuna.trial.TrialState.COMPLETE) == 3 + 16


def test_several_objectives_are_searched_together(tmp_path: Path) -> None:
    storage = open_storage(None, tmp_path)
    done = search(
        space(), lambda cell: (value(cell)[0], -value(cell)[0]), strategy="funnel", seed=0, objectives=2, storage=storage
    )
    assert done == 16
    (summary,) = optuna.get_all_study_summaries(storage)
    assert len(optuna.load_study(study_name=summary.study_name, storage=storage).directions) == 2
