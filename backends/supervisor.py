"""Ends an engine with everything it started, also when the harness itself is killed.

Run as ``python -I -S supervisor.py PARENT_PID LOG HEAD_BYTES TAIL_BYTES COMMAND...`` with a pipe on stdin that only the harness
holds. It needs the standard library alone, so that it is up before the engine has imported anything.

A parent-death signal is not enough for this: it fires when the *thread* that started the child ends, and grandchildren do not
have it. Here the pipe's end, or another parent process than the one given, is the sign. As a child subreaper (Linux) this
process inherits every orphan, so that a grandchild which forked twice and opened a session of its own is found all the same.

The harness's own child is only a stand-in for the process that supervises: Ray, for one, kills the children of a worker that ends, with
SIGKILL and none of their descendants.

stdin   ``stop SECONDS``: end the engine, with that long between SIGTERM and SIGKILL; end of file: the harness died
stdout  a JSON object a line: ``{"pid": 1}``, ``{"error": "..."}`` (no such command), ``{"exit": -9}``, ``{"survivors": [1]}``
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

ORPHAN_GRACE_S = 2.0  # from SIGTERM to SIGKILL when the harness died: all is over within 5 s
LEFTOVER_GRACE_S = 1.0  # the same for what an engine left behind when it ended by itself
UNKILLABLE_S = 10.0  # a process in an uninterruptible driver call does not die even of SIGKILL
TICK_S = 0.1

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class BoundedLog:
    """A log file of at most `head` + 2 × `tail` bytes: its beginning, where a start fails, and its end, where a crash shows."""

    def __init__(self, path: Path, head: int, tail: int) -> None:
        self._file = path.open("w+b", buffering=0)
        self._head, self._tail = head, tail
        self._size = self._dropped = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._size += len(data)
        if self._size > self._head + 2 * self._tail:
            self._drop_middle()

    def _drop_middle(self) -> None:
        self._dropped += self._size - self._head - self._tail
        self._file.seek(self._size - self._tail)
        tail = self._file.read()
        self._file.seek(self._head)
        self._file.truncate()
        self._file.write(b"\n[... %d bytes dropped ...]\n" % self._dropped + tail)
        self._size = self._file.tell()


def become_subreaper() -> None:
    """Let orphaned descendants become children of this process instead of init's. Linux only; elsewhere the group must do."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[int]:
    """Processes below this one, whatever their session or group; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text(errors="replace")
            except OSError:  # it ended meanwhile
                continue
            parent = int(stat.rpartition(")")[2].split()[1])  # the name, in brackets, may itself hold spaces and brackets
            children.setdefault(parent, []).append(int(entry))
    found: list[int] = []
    todo = [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def send(message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # where the harness is gone, nobody listens
        os.write(1, json.dumps(message).encode() + b"\n")


def signal_all(group: int, number: int) -> None:
    """Signal the engine's process group and every descendant outside it."""
    try:
        os.killpg(group, number)
        in_group = {pid for pid in descendants() if _group_of(pid) == group}
    except OSError:  # the group is empty
        in_group = set()
    for pid in set(descendants()) - in_group:
        try:
            os.kill(pid, number)
        except OSError:  # it ended meanwhile
            continue


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None


def start(argv: list[str], output: int) -> int:
    """Start `argv` in a session of its own, both output streams into the pipe `output`. Returns its process id."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, output, 1),
        (os.POSIX_SPAWN_DUP2, output, 2),
    ]
    return os.posix_spawnp(argv[0], argv, os.environ, file_actions=actions, setsid=True, setsigdef=[signal.SIGPIPE])


class Supervision:
    """One engine from its start to the end of its last descendant."""

    def __init__(self, engine: int, parent: int, output: int, log: BoundedLog) -> None:
        self._engine, self._parent, self._output, self._log = engine, parent, output, log
        self._kill_at: float | None = None
        self._orders = b""
        self._poll = select.poll()
        for fd in (0, output):
            self._poll.register(fd, select.POLLIN)

    def stop(self, grace_s: float) -> None:
        if self._kill_at is None:
            signal_all(self._engine, signal.SIGTERM)
        self._kill_at = min(self._kill_at or float("inf"), time.monotonic() + grace_s)

    def run(self) -> None:
        while self._reap():
            for fd, _ in self._poll.poll(TICK_S * 1000):
                if fd == self._output:
                    self._copy_output()
                else:
                    self._read_orders()
            if os.getppid() != self._parent:
                self.stop(ORPHAN_GRACE_S)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                signal_all(self._engine, signal.SIGKILL)
                if time.monotonic() >= self._kill_at + UNKILLABLE_S:
                    send({"survivors": descendants()})
                    return
                time.sleep(TICK_S / 10)
        self._copy_output()

    def _reap(self) -> bool:
        """Collect what ended. False once no child, and so no descendant, is left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self._engine:
                    self._copy_output()  # the last words are in the log before the exit is announced
                    send({"exit": os.waitstatus_to_exitcode(status)})
                    self.stop(LEFTOVER_GRACE_S)
        except ChildProcessError:
            return False

    def _read_orders(self) -> None:
        data = os.read(0, 4096)
        self._orders += data
        if not data:
            self._poll.unregister(0)
            self.stop(ORPHAN_GRACE_S)
        *lines, self._orders = self._orders.split(b"\n")
        for line in lines:
            self.stop(float(line.split()[1]))

    def _copy_output(self) -> None:
        try:
            while data := os.read(self._output, 1 << 16):
                self._log.write(data)
        except BlockingIOError:
            return
        except OSError:  # disk full: the engine must not block on its log
            return


def stand_in(parent: int) -> int:
    """Leave this process as a child of `parent` that ends when it or the supervision does, and go on in a child of its own.

    Returns the process id that is left behind, in the child.
    """
    left = os.getpid()
    supervision = os.fork()
    if not supervision:
        return left
    os.close(0)  # the pipes are the child's
    os.close(1)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(supervision, signal.SIGTERM))
    while os.getppid() == parent:
        ended, status = os.waitpid(supervision, os.WNOHANG)
        if ended:
            os._exit(max(0, os.waitstatus_to_exitcode(status)))
        time.sleep(TICK_S)
    os._exit(0)


def main() -> int:
    parent, path, head, tail, *argv = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    left = stand_in(int(parent))
    become_subreaper()
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    try:
        engine = start(argv, write_end)
    except OSError as error:
        send({"error": error.strerror or str(error)})
        return 1
    os.close(write_end)
    supervision = Supervision(engine, left, read_end, BoundedLog(Path(path), int(head), int(tail)))
    signal.signal(signal.SIGTERM, lambda *_: supervision.stop(ORPHAN_GRACE_S))
    send({"pid": engine})
    supervision.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
