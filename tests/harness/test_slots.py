"""Loads on several slots: what is taken when, and what becomes of a load whose worker is lost."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

from backends.types import BackendError, Endpoint, ServingConfig
from harness.bench import Order, Outcome, Setup
from harness.findings import closed_load
from harness.slots import LocalSlot, Slot, measure_all
from tests.harness.simulated_lab import SimulatedLab, engines_of, wait_for_engines


class Gone(Exception):
    pass


class FakeSlot:
    """Loses its worker at the orders named; there is no other worker for one that is `mortal`."""

    lost = (Gone,)

    def __init__(self, name: str, loses: tuple[str, ...] = (), *, mortal: bool = False) -> None:
        self.name, self.loses, self.mortal = name, list(loses), mortal
        self.measured: list[str] = []

    def call(self, method: str, *args: Any) -> Future[Any]:
        (order,) = args
        found: Future[Any] = Future()
        if order.key in self.loses:
            self.loses.remove(order.key)
            found.set_exception(Gone("node 7 does not answer\nwith a long story"))
        else:
            self.measured.append(order.key)
            found.set_result(Outcome(1.0, 0.0, fields={}))
        return found

    def renew(self) -> bool:
        return not self.mortal

    def close(self) -> None:
        pass


def orders(keys: str) -> Iterator[Order]:
    return (Order(key, ServingConfig("simulated", "w"), closed_load("t", 1), ()) for key in keys)


def measured(slots: list[Any], *units: str) -> dict[str, str | None]:
    found = [(order.key, outcome.reason) for order, outcome, _ in measure_all(slots, map(orders, units))]
    assert len(found) == len({key for key, _ in found})
    return dict(found)


def test_the_loads_of_a_server_stay_on_one_slot_in_their_order() -> None:
    a, b = FakeSlot("a"), FakeSlot("b")
    assert measured([a, b], "123", "456", "78") == dict.fromkeys("12345678")
    chains = {"".join(slot.measured) for slot in (a, b)}
    assert any("123" in chain for chain in chains)
    assert any("456" in chain for chain in chains)
    assert a.measured
    assert b.measured


def test_a_server_is_asked_for_only_when_a_slot_is_free_and_sees_all_results_before_it() -> None:
    done: list[str] = []

    def units() -> Iterator[Iterator[Order]]:
        for i, keys in enumerate(("12", "34", "5")):
            assert len(done) == 2 * i
            yield orders(keys)

    for order, _, _ in measure_all([FakeSlot("only")], units()):
        done.append(order.key)
    assert done == list("12345")


def test_a_load_whose_worker_is_lost_is_measured_once_elsewhere_and_its_server_goes_on_there() -> None:
    a, b = FakeSlot("a", ("2",), mortal=True), FakeSlot("b")
    slots: list[Slot] = [a, b]
    assert measured(slots, "123", "45") == dict.fromkeys("12345")
    assert slots == [b]
    assert a.measured == ["1"]
    assert [key for key in b.measured if key in "23"] == ["2", "3"]


def test_a_load_that_costs_two_workers_fails_with_the_cause_and_the_rest_goes_on() -> None:
    found = measured([FakeSlot("a", ("2", "2"))], "123", "45")
    assert found.pop("2") == "the worker on a was lost: node 7 does not answer; so was another one before it"
    assert found == dict.fromkeys("1345")


def test_without_any_worker_left_the_run_ends_in_one_line() -> None:
    with pytest.raises(BackendError, match="no worker is left"):
        measured([FakeSlot("a", ("1",), mortal=True)], "12")


# Real worker processes and engines.


def two_slots(setup: Setup) -> list[Slot]:
    return [LocalSlot(setup, ["0"]), LocalSlot(setup, ["1", "2"])]


def visible(_: Endpoint) -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


def kill_one_worker(folder: Path, killed: list[psutil.Process]) -> None:
    """Once two engines run, kill the worker process above one of them."""
    running = wait_for_engines(folder, 2)
    victim = next(parent for process in reversed(running) if (parent := process.parent()) and parent not in running)
    killed += [victim, *victim.children(recursive=True)]
    victim.kill()


@pytest.mark.slow  # four workers and five engines are started
@pytest.mark.timeout(900)
def test_every_load_is_measured_once_although_a_worker_is_killed_and_no_engine_is_left(tmp_path: Path) -> None:
    made = SimulatedLab(tmp_path, two_slots)
    killed: list[psutil.Process] = []
    killer = threading.Thread(target=kill_one_worker, args=(tmp_path, killed))
    killer.start()
    cells = [[(1, 1), (1, 2)], [(2, 1), (2, 2)], [(3, 1)]]
    with made.lab as lab:
        done = list(lab.ahead(cells, made.wanted))
        seen = [slot.call("look", made.config(0), visible).result()[0] for slot in lab.slots]
        again = [lab.run(*wanted) for cell in done for wanted in made.wanted(cell)]
    killer.join()
    assert sorted(done) == [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)]
    assert [(trial.state, trial.reason) for trial in made.store.trials] == [("COMPLETE", None)] * 5
    assert sorted(trial.number for trial in again) == [0, 1, 2, 3, 4]  # found, not measured again
    assert {trial.worker for trial in again} == {"GPU 0", "GPU 1,2"}
    assert seen == ["0", "1,2"]
    assert len(killed) >= 2
    _, alive = psutil.wait_procs([*killed, *engines_of(tmp_path)], timeout=10)
    assert not alive
