"""The search over (server, batch size) cells with Optuna's ask/tell. It sees one function that measures a cell, and nothing else.

A cell's value is the logarithm of its objective over the baseline's at the same batch size, so that cells of different batch
sizes are on one scale; smaller is better. Once a server runs, its other batch sizes are asked next: a start costs more than a load.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, takewhile
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import optuna
import psutil
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from backends.types import BackendError, ConfigError, ServingConfig
from harness.space import Space, group_key

optuna.logging.set_verbosity(optuna.logging.WARNING)


@dataclass(frozen=True, slots=True)
class Cell:
    config: ServingConfig
    batch_size: int

    def params(self) -> dict[str, str | int]:
        """The cell as Optuna parameters: one categorical for each axis, so that the sampler can learn each axis."""
        c = self.config
        return {
            "backend": c.backend,
            "weight_quantization": c.weight_quantization,
            "kv_cache_dtype": c.kv_cache_dtype,
            "variant": c.variant,
            "k": c.k,
            "topk": c.topk,
            "num_draft_tokens": c.num_draft_tokens or 0,
            "draft_quantization": c.draft_quantization,
            "batch_size": self.batch_size,
        }


CellValue = tuple[float, ...]
P = ParamSpec("P")
T = TypeVar("T")
PATIENCE_S = 60.0  # that a database may take to come back
Identity = Callable[[ServingConfig], object]
IMPORTED = "imported_from"
"""Attribute of a trial that another study of the storage measured: the name of that study."""
MeasureCell = Callable[[Cell], CellValue | None]
"""Measures a cell; None where it failed, which Optuna is told as FAIL and never as a number."""
Ahead = Callable[[Iterable[Iterable[Cell]]], Iterable[Cell]]
"""Takes servers, each with its cells, as it has room for them, and gives back each cell when it can be measured at once."""


class CellStudy:
    """The Optuna study of a set of cells: `ask` proposes one that was not asked yet, `record` tells one that somebody else chose.

    Each trial carries its owner, so that a run that resumes can tell the trials of a dead process from those of one that works.
    """

    def __init__(self, cells: Sequence[Cell], study: optuna.Study, identity: Identity = lambda config: None) -> None:
        self.todo = {_key(cell.params()): cell for cell in cells}
        self._study = study
        self._identity = identity
        self._axes = _axes(cells)
        self._told = {_key(t.params) for t in study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])}
        self._misses = 0
        # Nothing was ever asked here: a new space.
        self.fresh = all(IMPORTED in trial.user_attrs for trial in study.get_trials(deepcopy=False))

    def ask(self, queue: Sequence[Cell] = ()) -> tuple[optuna.Trial, Cell]:
        """The first of `queue`, or the sampler's own choice among the cells that are left."""
        while True:
            if queue:
                _patiently(self._study.enqueue_trial, queue[0].params())
            trial = _patiently(self._study.ask, self._axes)
            _patiently(trial.set_user_attr, "owner", _owner())
            cell = self.todo.pop(_key(trial.params), None)
            if cell is not None:
                _patiently(trial.set_user_attr, "identity", _hash(self._identity(cell.config)))
                return trial, cell
            self._tell(trial, TrialState.FAIL)  # no such cell, or measured before: its value is known already
            self._misses += 1
            queue = queue[1:]
            if self._misses % 10 == 0:  # the sampler insists: hand it a cell that is not known
                queue = [next(iter(self.todo.values())), *queue]

    def tell(self, trial: optuna.Trial, values: CellValue | None) -> None:
        """None where the cell could not be measured: FAIL, never a number. A cell that an earlier run told counts once."""
        if values is None or _key(trial.params) in self._told:
            self._tell(trial, TrialState.FAIL)
        else:
            self._tell(trial, TrialState.COMPLETE, list(values))
            self._told.add(_key(trial.params))

    def record(self, cell: Cell, values: CellValue | None) -> None:
        """Tell a cell that was chosen and measured elsewhere, if it was not told before."""
        key = _key(cell.params())
        if key in self._told:
            self.todo.pop(key, None)
        elif key in self.todo:
            trial, _ = self.ask([cell])
            self.tell(trial, values)

    def prune(self, config: ServingConfig) -> None:
        """Tell that the cells of `config` that are left will not be measured."""
        for cell in [cell for cell in self.todo.values() if cell.config == config]:
            trial, _ = self.ask([cell])
            self._tell(trial, TrialState.PRUNED)

    def _tell(self, trial: optuna.Trial, state: TrialState, values: list[float] | None = None) -> None:
        """A trial that is told already, since only the database's answer was lost, stays as it is."""
        _patiently(self._study.tell, trial, values, state, skip_if_finished=True)


def _patiently(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`call`, and again while the database restarts.

    Raises:
        BackendError: it did not come back in time.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call(*args, **kwargs)
        except StorageInternalError:
            if time.monotonic() >= deadline:
                raise BackendError(
                    f"the database of --storage has not answered for {PATIENCE_S:.0f} s; what was measured is kept: the same "
                    "command goes on from there"
                ) from None
            time.sleep(1.0)


def _owner() -> dict[str, str | int | float]:
    return {"host": platform.node(), "pid": os.getpid(), "started": psutil.Process().create_time()}


def _is_gone(owner: Mapping[str, Any] | None) -> bool:
    """Whether the process that asked for a trial no longer works on it; one on another host is given the benefit of the doubt."""
    if owner is None:
        return True
    if owner["host"] != platform.node():
        return False
    try:
        return bool(psutil.Process(owner["pid"]).create_time() != owner["started"])
    except psutil.NoSuchProcess:
        return True


def search(
    space: Space,
    measure: MeasureCell,
    study: CellStudy,
    *,
    strategy: str,
    max_cells: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    ahead: Ahead = chain.from_iterable,
) -> int:
    """Measure cells until the space or `max_cells` is used up, or `stop` says so. Returns the number of cells measured.

    `grid` visits all cells in order; `random` draws them without repeats; `tpe` starts with each variant's middle K and then lets
    TPE choose, up to a third of a large space. `ahead` may measure several servers at once: each is asked for when it has room.
    """
    limit = visits(space, strategy, max_cells)
    open_trials: dict[Cell, optuna.Trial] = {}

    def servers() -> Iterator[Iterator[Cell]]:
        queue, left = _opening(space, strategy), limit
        while left > 0 and study.todo and not stop():
            trial, first = study.ask(queue)
            server = {first: trial}
            for sibling in [cell for cell in study.todo.values() if cell.config == first.config][: left - 1]:
                server[sibling], _ = study.ask([sibling])
            left -= len(server)
            open_trials.update(server)
            queue = [cell for cell in queue if cell.config != first.config]
            yield takewhile(lambda cell, first=first: cell == first or not stop(), server)  # type: ignore[misc]

    done = 0
    for cell in ahead(servers()):
        study.tell(open_trials.pop(cell), measure(cell))
        done += 1
    for trial in open_trials.values():  # there was no time for them
        study.tell(trial, None)
    return done


def visits(space: Space, strategy: str, max_cells: int | None) -> int:
    """How many cells a search without a deadline measures."""
    cells = len(cells_of(space))
    if strategy == "tpe":
        return min(cells, max_cells or max(16, cells // 3))
    return min(cells, max_cells or cells)


def cells_of(space: Space) -> list[Cell]:
    return [Cell(config, batch) for config in space.candidates for batch in space.batch_sizes]


def _opening(space: Space, strategy: str) -> list[Cell]:
    """Cells to visit first: all of them for a grid, none for random, each variant's middle K for TPE."""
    if strategy == "grid":
        return cells_of(space)
    if strategy == "random":
        return []
    groups: dict[tuple[object, ...], list[ServingConfig]] = {}
    for config in space.candidates:
        groups.setdefault((*group_key(config), config.variant, config.topk), []).append(config)
    middles = [configs[len(configs) // 2] for configs in groups.values()]
    return [Cell(config, batch) for config in middles for batch in space.batch_sizes]


def _axes(cells: Sequence[Cell]) -> dict[str, optuna.distributions.BaseDistribution]:
    values: dict[str, list[str | int]] = {}
    for cell in cells:
        for name, value in cell.params().items():
            seen = values.setdefault(name, [])
            if value not in seen:
                seen.append(value)
    return {name: _axis(choices) for name, choices in values.items()}


def _axis(choices: Sequence[str | int]) -> optuna.distributions.BaseDistribution:
    """An even range of numbers keeps its order, so that the sampler can learn from neighbours; anything else is a choice."""
    numbers = sorted(c for c in choices if isinstance(c, int))
    gaps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) == len(choices) and len(gaps) == 1:
        return optuna.distributions.IntDistribution(numbers[0], numbers[-1], step=gaps.pop())
    return optuna.distributions.CategoricalDistribution(choices)


def _hash(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _key(params: Mapping[str, str | int]) -> str:
    return json.dumps(params, sort_keys=True)


def open_study(
    cells: Sequence[Cell],
    storage: BaseStorage,
    *,
    strategy: str,
    seed: int,
    objectives: int,
    conditions: Mapping[str, object] | None = None,
    identity: Identity = lambda config: None,
) -> CellStudy:
    """The study of exactly these cells under these `conditions` (hardware, part of the trace). `identity` is what stands behind a
    configuration: the content of its checkpoints, its engine's version.

    A changed space is a new study, since Optuna cannot change the choices of an old one; it begins with the trials of older ones in
    the same storage that were measured under the same conditions on a server of the same identity.
    """
    known = {_key(cell.params()): _hash(identity(cell.config)) for cell in cells}
    where = _hash([conditions, objectives])
    sampler = (
        optuna.samplers.RandomSampler(seed=seed)
        if strategy == "random"
        else optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=8, constant_liar=True)
    )
    study = optuna.create_study(
        study_name="spectune-" + _hash([known, where, strategy])[:16],
        storage=storage,
        sampler=sampler,
        directions=["minimize"] * objectives,
        load_if_exists=True,
    )
    for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING, TrialState.WAITING]):
        if _is_gone(trial.user_attrs.get("owner")):  # what it measured is in its run directory and will be told again
            storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
    if not study.get_trials(deepcopy=False):
        _import(study, storage, cells, known, where)
        study.set_user_attr("conditions", where)
    return CellStudy(cells, study, identity)


def _import(study: optuna.Study, storage: BaseStorage, cells: Sequence[Cell], known: Mapping[str, str], where: str) -> None:
    """Tell `study` what older ones of the storage found out about its cells, each cell once."""
    axes, told = _axes(cells), set[str]()
    for summary in optuna.get_all_study_summaries(storage):
        if summary.user_attrs.get("conditions") != where:
            continue
        old = optuna.load_study(study_name=summary.study_name, storage=storage)
        for trial in old.get_trials(deepcopy=False, states=[TrialState.COMPLETE]):
            key = _key(trial.params)
            if key not in told and known.get(key) == trial.user_attrs.get("identity", ""):
                attributes = {**trial.user_attrs, IMPORTED: summary.study_name}
                told.add(key)
                study.add_trial(
                    optuna.trial.create_trial(
                        params=trial.params, distributions=axes, values=trial.values, user_attrs=attributes
                    )
                )


def open_storage(url: str | None, directory: Path) -> BaseStorage:
    """A journal file in the run directory, or a shared database by URL.

    A journal whose writer was killed can end in half a line, after which Optuna cannot read it: it is cut back to its last
    whole line first, under the lock that says nobody else writes.

    Raises:
        ConfigError: the database cannot be opened.
    """
    if url:
        try:
            return optuna.storages.RDBStorage(url, engine_kwargs={"pool_pre_ping": True})  # connections die with a restart
        except (ImportError, SQLAlchemyError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"--storage {url.split('@')[-1]}: {reason}; for PostgreSQL install the extra 'postgres'"
            ) from None
    path = directory / "study.journal"
    if path.exists():
        with open(path, "r+b") as journal:
            fcntl.flock(journal, fcntl.LOCK_EX)
            content = journal.read()
            journal.truncate(content.rfind(b"\n") + 1)
            os.fsync(journal.fileno())
        for lock in directory.glob("study.journal.lock*"):  # of a killed run; ours is the only one (RunStore's lock)
            with contextlib.suppress(FileNotFoundError):
                lock.unlink()
    return JournalStorage(JournalFileBackend(str(path)))
