"""Slots: places where one engine at a time is measured, in this process or in worker processes with GPUs of their own.

`measure_all` keeps them busy. A slot whose worker is lost gives its load to another, once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Protocol

from backends.types import BackendError
from harness.bench import Bench, Order, Outcome, Setup

ENGINE_ENDS_S = 5.0
"""After its worker was lost, a supervisor has ended its engine within this time; another one would find the GPU's memory taken."""


class Slot(Protocol):
    """A `Bench` that may be elsewhere. `call("measure", order)` is the bench's own method, its result in a future."""

    @property
    def name(self) -> str | None: ...  # what a trial says of where it was measured; None for this process

    @property
    def lost(self) -> tuple[type[BaseException], ...]: ...  # what a future raises when the worker is gone

    def call(self, method: str, *args: Any) -> Future[Any]: ...

    def renew(self) -> bool: ...  # a new worker for a lost one; False where there is no place for it

    def close(self) -> None: ...  # ends the worker, and its engine, at once


class Here:
    """This process: a load is measured while `call` is under way."""

    name = None
    lost: tuple[type[BaseException], ...] = ()

    def __init__(self, setup: Setup) -> None:
        self._bench = Bench(setup)

    def call(self, method: str, *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(getattr(self._bench, method)(*args))
        return done

    def renew(self) -> bool:
        return True

    def close(self) -> None:
        self._bench.stop()


class LocalSlot:
    """A worker process whose engines see some of this host's GPUs."""

    lost = (BrokenExecutor,)

    def __init__(self, setup: Setup, gpus: Sequence[str]) -> None:
        """`gpus` as CUDA_VISIBLE_DEVICES names them."""
        self.name = f"GPU {','.join(gpus)}"
        self._setup, self._gpus = replace(setup, gpus=len(gpus)), tuple(gpus)
        self._open()

    def call(self, method: str, *args: Any) -> Future[Any]:
        try:
            return self._pool.submit(_on_bench, method, *args)
        except BrokenExecutor as error:  # it ended between two calls
            lost: Future[Any] = Future()
            lost.set_exception(error)
            return lost

    def renew(self) -> bool:
        self.close()
        time.sleep(ENGINE_ENDS_S)
        self._open()
        return True

    def close(self) -> None:
        self._leash.close()
        self._pool.shutdown(cancel_futures=True)

    def _open(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share the locks of this process's threads
        held, self._leash = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(1, context, _open_bench, (self._setup, self._gpus, held))


_bench: Bench  # of this worker process


def _open_bench(setup: Setup, gpus: Sequence[str], leash: Connection) -> None:
    global _bench  # noqa: PLW0603 - a pool's worker has no other place for what it keeps
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the coordinator, which then lets go of the leash
    os.environ |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    threading.Thread(target=_end_with, args=(leash,), daemon=True).start()
    _bench = Bench(setup)


def _end_with(leash: Connection) -> None:
    """End this process when the coordinator closes its end or dies; the engine's supervisor then ends the engine."""
    with contextlib.suppress(EOFError):
        leash.recv()
    os._exit(0)


def _on_bench(method: str, *args: Any) -> Any:
    return getattr(_bench, method)(*args)


@dataclass(frozen=True, slots=True)
class _Work:
    order: Order
    unit: Iterator[Order]  # what is left of it
    losses: int = 0  # workers that this order cost


def measure_all(slots: list[Slot], units: Iterable[Iterator[Order]]) -> Iterator[tuple[Order, Outcome, Slot]]:
    """Each order's outcome as soon as it is there, with the slot it was measured on.

    A unit is what one slot measures one after the other: the loads of one server. It is taken when a slot is free. Where a slot's
    worker is lost, the order under way and what is left of its unit go on with another worker, on a slot that is free; an order that
    loses a second worker fails. A slot that gets no other worker is taken out of `slots`.

    Raises:
        BackendError: no slot is left.
    """
    fresh = filter(None, map(_next, units))
    again: deque[_Work] = deque()
    idle = deque(slots)
    running: dict[Future[Outcome], tuple[Slot, _Work]] = {}
    while True:
        while idle and (work := again.popleft() if again else next(fresh, None)):
            slot = idle.popleft()
            running[slot.call("measure", work.order)] = (slot, work)
        if not running:
            if again:
                raise BackendError("no worker is left; what was measured is kept, and the same --out goes on from there")
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            slot, work = running.pop(future)
            try:
                outcome = future.result()
            except slot.lost as error:
                reason = f"the worker on {slot.name} was lost: {(str(error) or type(error).__name__).splitlines()[0]}"
                if slot.renew():
                    idle.append(slot)
                else:
                    slots.remove(slot)
                if not work.losses:
                    again.append(replace(work, losses=1))
                    continue
                yield work.order, Outcome(0.0, 0.0, f"{reason}; so was another one before it"), slot
                again.extend(filter(None, [_next(work.unit)]))
            else:
                yield work.order, outcome, slot
                following = _next(work.unit)
                if following is None:
                    idle.append(slot)
                else:
                    running[slot.call("measure", following.order)] = (slot, following)


def _next(unit: Iterator[Order]) -> _Work | None:
    order = next(unit, None)
    return None if order is None else _Work(order, unit)
