"""Forked processes that do what this one would do piece by piece: a machine with two cores reads runs twice as fast.

A worker is asked for a piece by its number and answers with bytes. It never decides anything: a piece that failed in it, or
that it took with it when it was killed, is done again here, and fails here if it must. A worker ends when the other end of its
pipe is closed, also by this process's own end.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

MAX_WORKERS = 4
"""A report is most often made on a login node, which others use too."""

LEAST_PIECES = 8
"""Fewer are done before a second process has begun."""

ASKED_AHEAD = 2
"""Pieces that a worker has before it: it never waits for the next one."""

WAITING = 64
"""Answers that may wait for a slower one before them: a bound on memory."""

Work = Callable[[int], bytes]


class _Worker(NamedTuple):
    pid: int
    pipe: Connection
    asked: list[int]


def workers_for(pieces: int) -> int:
    """How many processes are worth it: as many as there are cores for this one, none if there is one core."""
    cores = len(os.sched_getaffinity(0))
    return min(cores, MAX_WORKERS) if cores > 1 and pieces >= LEAST_PIECES else 0


@contextmanager
def beside(work: Callable[[], object], *, forked: bool) -> Iterator[None]:
    """Does what leaves nothing but files: in a process of its own while the body runs, or after it.

    Args:
        forked: whether that is worth a process. Where it fails there, it is done again here.
    """
    pid = _child(work) if forked else None
    try:
        yield
    finally:
        is_done = pid is not None and _ended_well(pid)
    if not is_done:
        work()


@contextmanager
def shared_out(work: Work, pieces: int, workers: int) -> Iterator[Iterator[bytes | None]]:
    """The answers of `work` to 0, 1, ... `pieces` - 1, in this order. None: there is no answer, do it yourself.

    Args:
        work: runs in a copy of this process: what it changes in memory is seen nowhere else.
    """
    team: list[_Worker] = []
    try:
        for _ in range(min(workers, pieces)):
            team.append(_forked(work, team))
        yield _in_order(team, pieces)
    finally:
        for worker in team:
            worker.pipe.close()
        for worker in team:
            _ended_well(worker.pid)


def _forked(work: Work, others: list[_Worker]) -> _Worker:
    from multiprocessing import Pipe

    ours, its = Pipe()

    def live() -> None:
        for pipe in (ours, *(other.pipe for other in others)):
            pipe.close()
        _answer(its, work)

    pid = _child(live)
    its.close()
    return _Worker(pid, ours, [])


def _child(live: Callable[[], object]) -> int:
    """A copy of this process that does nothing else; its number."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for the process that asks
        live()
        status = 0
    finally:
        os._exit(status)  # nothing of the process that was copied is ended or flushed here


def _ended_well(pid: int) -> bool:
    try:
        return os.waitpid(pid, 0)[1] == 0
    except ChildProcessError:  # whoever called us ignores the ends of children
        return False


def _answer(pipe: Connection, work: Work) -> None:
    """A worker's whole life."""
    while True:
        try:
            number = int.from_bytes(pipe.recv_bytes(), "little")
        except (EOFError, OSError):
            return
        try:
            answer = b"+" + work(number)
        except Exception:
            answer = b"-"
        pipe.send_bytes(answer)


def _in_order(team: list[_Worker], pieces: int) -> Iterator[bytes | None]:
    answers: dict[int, bytes | None] = {}
    working, to_ask = list(team), 0
    for number in range(pieces):
        while number not in answers and working:
            while to_ask < min(pieces, number + WAITING) and (idle := _idlest(working)):
                _ask(idle, to_ask)
                to_ask += 1
            _collect(working, answers)
        yield answers.pop(number, None)


def _idlest(working: list[_Worker]) -> _Worker | None:
    found = min(working, key=lambda worker: len(worker.asked), default=None)
    return found if found is not None and len(found.asked) < ASKED_AHEAD else None


def _ask(worker: _Worker, number: int) -> None:
    worker.asked.append(number)
    with suppress(OSError):  # that it has gone is seen when its answer is waited for
        worker.pipe.send_bytes(number.to_bytes(4, "little"))


def _collect(working: list[_Worker], answers: dict[int, bytes | None]) -> None:
    """Waits for one answer at least, or for a worker's end, with which all that it was asked remains unanswered."""
    from multiprocessing.connection import wait

    ready = wait([worker.pipe for worker in working])
    for worker in [worker for worker in working if worker.pipe in ready]:
        try:
            answer = worker.pipe.recv_bytes()
            answers[worker.asked.pop(0)] = answer[1:] if answer[:1] == b"+" else None
        except (EOFError, OSError):
            working.remove(worker)
            answers.update(dict.fromkeys(worker.asked))
