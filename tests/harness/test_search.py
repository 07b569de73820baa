import itertools
import math
import multiprocessing
import os
from pathlib import Path

import optuna
import pytest

from backends.types import ServingConfig
from harness.search import Cell, CellStudy, cells_of, open_storage, open_study, search
from harness.space import Space


def space(ks: range = range(1, 5), batches: tuple[int, ...] = (1, 4)) -> Space:
    off = ServingConfig(backend="reference", model="m")
    on = [ServingConfig(backend="reference", model="m", variant=v, k=k) for v in ("ngram", "suffix") for k in ks]
    return Space((off,), tuple(on), (), batches)


def value(cell: Cell) -> tuple[float, ...]:
    """A smooth truth with one best cell: suffix at K 3, better at batch 1."""
    return (abs(cell.config.k - 3) * 0.1 + (cell.config.variant == "ngram") * 0.2 + math.log(cell.batch_size) * 0.1,)


def study(where: Path, of: Space | None = None, strategy: str = "grid", objectives: int = 1) -> CellStudy:
    return open_study(cells_of(of or space()), open_storage(None, where), strategy=strategy, seed=1, objectives=objectives)


def run(where: Path, visited: list[Cell], strategy: str, of: Space | None = None, **options: int) -> int:
    def measure(cell: Cell) -> tuple[float, ...]:
        visited.append(cell)
        return value(cell)

    chosen = of or space()
    return search(chosen, measure, study(where, chosen, strategy), strategy=strategy, **options)  # type: ignore[arg-type]


def stored(where: Path) -> optuna.Study:
    """The only study in the directory."""
    storage = open_storage(None, where)
    (summary,) = optuna.get_all_study_summaries(storage)
    return optuna.load_study(study_name=summary.study_name, storage=storage)


@pytest.mark.parametrize("strategy", ["grid", "random", "tpe"])
def test_every_cell_is_measured_once_and_only_once(tmp_path: Path, strategy: str) -> None:
    visited: list[Cell] = []
    assert run(tmp_path, visited, strategy) == 16
    assert len(visited) == len(set(visited)) == 16


@pytest.mark.parametrize("strategy", ["grid", "tpe"])
def test_a_server_is_not_started_twice(tmp_path: Path, strategy: str) -> None:
    visited: list[Cell] = []
    run(tmp_path, visited, strategy)
    starts = [config for config, _ in itertools.groupby(visited, key=lambda cell: cell.config)]
    assert len(starts) == len(set(starts)) == 8


def test_max_cells_bounds_the_search(tmp_path: Path) -> None:
    visited: list[Cell] = []
    assert run(tmp_path, visited, "random", max_cells=5) == 5
    assert len(visited) == 5


def test_tpe_finds_the_best_of_a_large_space_in_a_third_of_it(tmp_path: Path) -> None:
    visited: list[Cell] = []
    large = space(range(1, 13), (1, 2, 4, 8))
    assert run(tmp_path, visited, "tpe", large) == 32
    best = min(visited, key=value)
    assert (best.config.variant, best.config.k, best.batch_size) == ("suffix", 3, 1)


def test_a_failed_cell_is_told_as_a_failure_and_never_as_a_number(tmp_path: Path) -> None:
    search(
        space(),
        lambda cell: None if cell.config.variant == "ngram" else value(cell),
        study(tmp_path),
        strategy="grid",
    )
    found = stored(tmp_path)
    states = [t.state for t in found.get_trials(deepcopy=False) if t.params["variant"] == "ngram"]
    assert states == [optuna.trial.TrialState.FAIL] * 8
    assert found.best_trial.params["variant"] == "suffix"


def test_a_torn_journal_is_cut_to_its_last_whole_line_and_the_study_goes_on(tmp_path: Path) -> None:
    def killed_after_three() -> None:
        visited: list[Cell] = []

        def measure(cell: Cell) -> tuple[float, ...]:
            if len(visited) == 3:
                os._exit(9)
            visited.append(cell)
            return value(cell)

        search(space(), measure, study(tmp_path), strategy="grid")

    process = multiprocessing.get_context("fork").Process(target=killed_after_three)
    process.start()
    process.join(60)
    assert process.exitcode == 9
    with open(tmp_path / "study.journal", "ab") as journal:
        journal.write(b'{"op_code": 4, "worker_id": "half a li')
    again: list[Cell] = []
    run(tmp_path, again, "grid")
    assert len(set(again)) == 16
    states = [t.state for t in stored(tmp_path).get_trials(deepcopy=False)]
    assert optuna.trial.TrialState.RUNNING not in states
    assert states.count(optuna.trial.TrialState.COMPLETE) == 16  # the three of the killed run count once


def test_several_objectives_are_searched_together(tmp_path: Path) -> None:
    both = study(tmp_path, strategy="tpe", objectives=2)
    assert search(space(), lambda cell: (value(cell)[0], -value(cell)[0]), both, strategy="tpe") == 16
    assert len(stored(tmp_path).directions) == 2


def test_cells_that_another_search_chose_are_told_once_and_given_up_ones_are_pruned(tmp_path: Path) -> None:
    told = study(tmp_path)
    cells = cells_of(space())
    told.record(cells[0], (0.5,))
    told.record(cells[0], (0.7,))
    told.prune(cells[0].config)
    states = [(t.params["batch_size"], t.state.name, t.values) for t in stored(tmp_path).get_trials(deepcopy=False)]
    assert states == [(1, "COMPLETE", [0.5]), (4, "PRUNED", None)]
    assert len(told.todo) == 14


def test_a_trial_of_a_process_that_works_is_left_alone_and_one_of_a_dead_process_fails(tmp_path: Path) -> None:
    alive = study(tmp_path)
    alive.ask()
    study(tmp_path)
    assert [t.state.name for t in stored(tmp_path).get_trials(deepcopy=False)] == ["RUNNING"]
    storage = open_storage(None, tmp_path)
    (trial,) = stored(tmp_path).get_trials(deepcopy=False)
    storage.set_trial_user_attr(
        trial._trial_id, "owner", {**trial.user_attrs["owner"], "started": 1.0}
    )  # the pid was used again
    study(tmp_path)
    assert [t.state.name for t in stored(tmp_path).get_trials(deepcopy=False)] == ["FAIL"]


def test_a_larger_k_range_is_a_new_study_that_keeps_the_old_trials_where_they_still_hold(tmp_path: Path) -> None:
    def opened(ks: range, engine: str, machine: str = "m") -> optuna.Study:
        cells = cells_of(space(ks))
        told = open_study(
            cells,
            open_storage(None, tmp_path),
            strategy="tpe",
            seed=1,
            objectives=1,
            conditions={"machine": machine},
            identity=lambda config: engine if config.variant == "suffix" else "any",
        )
        for cell in list(told.todo.values()):
            told.record(cell, value(cell))
        return told._study

    def imported(study: optuna.Study) -> list[tuple[str, int]]:
        trials = [t for t in study.get_trials(deepcopy=False) if "imported_from" in t.user_attrs]
        return sorted({(t.params["variant"], t.params["k"]) for t in trials})

    assert imported(opened(range(1, 3), "1.0")) == []
    both = opened(range(1, 5), "1.0")
    assert imported(both) == [("ngram", 1), ("ngram", 2), ("suffix", 1), ("suffix", 2)]
    states = [t.state.name for t in both.get_trials(deepcopy=False)]
    assert states == ["COMPLETE"] * 16  # the eight old ones, and the new ones told once each
    assert imported(opened(range(1, 6), "2.0")) == [("ngram", k) for k in (1, 2, 3, 4)]  # another version of suffix's engine
    assert imported(opened(range(1, 7), "1.0", machine="another")) == []


def test_another_machine_or_model_is_another_study(tmp_path: Path) -> None:
    storage = open_storage(None, tmp_path)
    for conditions in ({"model": "a"}, {"model": "b"}, {"model": "a"}):
        open_study(cells_of(space()), storage, strategy="tpe", seed=1, objectives=1, conditions=conditions)
    assert len(optuna.get_all_study_summaries(storage)) == 2
