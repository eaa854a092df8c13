"""A pool of worker processes that host environments: one thread per process, one queue of events, in which the caller's engine
may put its answers too (`post`). A new episode goes where its goal was played before, or to the idlest worker."""

from __future__ import annotations

import itertools
import os
import queue
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from autorl_hpc.rollouts.child import PACKAGE, Child, ChildFailed
from autorl_hpc.rollouts.source import EnvironmentBroken, Source

LEAD = 4
"""Episodes that the worker which knows a goal may have more than another one. Beginning without its cache costs about ten steps;
waiting in a line of five costs more."""
SECRET = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|KEY|JWT", re.IGNORECASE)
"""Variables with such names are not passed to a worker with access to a vault. Agents don't have files/redact.py."""


class Reply(NamedTuple):
    """A worker's answer to a call: the action that the dialogue extracted ("" at the beginning), the next prompt (None if the
    episode is over), or the `error` of environment or dialogue; `final` if a retry would give it again."""

    ticket: int
    observation: str = ""
    done: bool = False
    reward: float = 0.0
    action: str = ""
    prompt: str | list[dict[str, str]] | None = None
    error: str | None = None
    final: bool = False


class Lost(NamedTuple):
    """A worker died, or was killed because it hung, at the call `ticket`; all its episodes, in `slots`, are gone."""

    worker: int
    ticket: int
    reason: str
    slots: tuple[int, ...] = ()


class Note(NamedTuple):
    """An event from outside the pool's workers; the sender tells notes of an earlier run from those of this one."""

    sender: object
    key: int
    content: Any


Event = Reply | Lost | Note | EnvironmentBroken
CALL_LIMIT_S = 120.0
"""Limit of one call. A step takes milliseconds, the slowest known reset (translating a game) seconds, on an idle machine."""
START_LIMIT_S = 300.0  # Limit until a new worker is ready, with Python and libraries cold on a busy shared file system
CLOSING_S = 10.0  # Time for all threads together to end after their processes are killed


@dataclass(eq=False)
class _Seat:
    """An episode's place in a worker: its `slot` is counted by the caller, and its `place` by the worker's process, which keeps an
    environment for each."""

    worker: EnvironmentProcess
    slot: int
    place: int
    open: bool = True


class EnvironmentProcess(threading.Thread):
    """Owns one process at a time, with JSON lines over pipes; replaces a process that dies or exceeds the time limit. It ends
    with its children, and with its starter."""

    def __init__(self, number: int, pool: Pool) -> None:
        super().__init__(name=f"environments-{number}", daemon=True)
        self.number, self._pool = number, pool
        self.calls: queue.SimpleQueue[tuple[int, _Seat, Mapping[str, Any]] | None] = queue.SimpleQueue()
        source, env = pool.source, dict(os.environ)
        if source.held_out:  # a grader's: no secrets, and no GPUs, which belong to the engine
            env = {name: value for name, value in env.items() if not SECRET.search(name)} | {"CUDA_VISIBLE_DEVICES": ""}
        first = {**vars(source), "file": str(source.file), "data": str(source.data), "options": dict(source.options)}
        self.child = Child(f"{PACKAGE}.worker", env, first, START_LIMIT_S, pool.call_limit_s)
        self.seats: set[_Seat] = set()  # this and the next under the pool's lock
        self.free: list[int] = []  # places that once hosted an episode
        self._ended = False

    def run(self) -> None:
        while (call := self.calls.get()) is not None and not self._ended:
            ticket, seat, request = call
            if not seat.open:
                continue
            event: Event
            try:
                event = Reply(ticket, **self.child.call(request))
            except Exception as error:  # any error must be reported, or the caller would wait for ever
                self.child.end()
                event = Lost(self.number, ticket, f"the environment {error}"[:500], self._pool.lose(self))
                if isinstance(error, ChildFailed) and error.starting:
                    event = EnvironmentBroken(f"{self._pool.source.file} can't be used: {error}")
            self._pool.post(event)
        self.child.end()

    def end(self) -> None:
        """Kill the process, even during a call; the thread ends then."""
        self._ended = True
        self.child.kill()
        self.calls.put(None)


class Pool:
    """Environments of one source in up to `workers` processes, which start when needed. Thread-safe.
    `call_limit_s`: seconds for one call."""

    def __init__(self, source: Source, workers: int = 2, *, call_limit_s: float = CALL_LIMIT_S) -> None:
        self.source, self.size, self.call_limit_s = source, max(1, workers), call_limit_s
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._seats: dict[int, _Seat] = {}  # by slot
        self._knows: dict[str, EnvironmentProcess] = {}  # by goal
        self._tickets = itertools.count(1)
        self._workers = [EnvironmentProcess(number, self) for number in range(self.size)]
        for worker in self._workers:
            worker.start()

    @property
    def pids(self) -> list[int]:
        """Ids of the running processes."""
        return [process.pid for worker in self._workers if (process := worker.child.process) is not None]

    def begin(self, slot: int, goal: Mapping[str, Any], seed: int) -> int:
        """Request the beginning of an episode in a slot; return the ticket, which the event repeats."""
        with self._lock:
            self._leave(slot)
            name, idlest = str(goal.get("id", "")), min(self._workers, key=lambda worker: len(worker.seats))
            worker = self._knows.get(name, idlest)
            if len(worker.seats) > len(idlest.seats) + LEAD:
                worker = idlest
            self._knows[name] = worker
            seat = _Seat(worker, slot, worker.free.pop() if worker.free else len(worker.seats))
            worker.seats.add(seat)
            self._seats[slot] = seat
            return self._call(seat, {"goal": dict(goal), "seed": seed})

    def act(self, slot: int, completion: str, *, last: bool = False) -> int:
        """Request one step of the episode in a slot with the model's completion; dropped if the episode is lost, which is reported
        separately. `last`: no further prompt is needed."""
        with self._lock:
            return self._call(self._seats.get(slot), {"completion": completion, "last": last})

    def release(self, slot: int) -> None:
        """Abandon a slot's episode and drop its pending calls."""
        with self._lock:
            self._leave(slot)

    def lose(self, worker: EnvironmentProcess) -> tuple[int, ...]:
        """Drop the episodes of a worker whose process is gone; return their slots."""
        with self._lock:
            slots = tuple(sorted(seat.slot for seat in worker.seats))
            for slot in slots:
                self._leave(slot)
            worker.free.clear()
            self._knows = {goal: knows for goal, knows in self._knows.items() if knows is not worker}
            return slots

    def post(self, event: Event) -> None:
        """Put an event into the queue, from any thread."""
        self._events.put(event)

    def hear(self, timeout_s: float | None = None) -> Reply | Lost | Note | None:
        """Return the next event of a worker, or note; None if there was none in time. Raises EnvironmentBroken: a worker could not
        create an environment."""
        try:
            event = self._events.get_nowait() if timeout_s == 0.0 else self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(event, EnvironmentBroken):
            raise event
        return event

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.end()
        deadline = time.monotonic() + CLOSING_S
        for worker in self._workers:
            worker.join(timeout=max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, seat: _Seat | None, request: Mapping[str, Any]) -> int:
        ticket = next(self._tickets)
        if seat is not None:
            seat.worker.calls.put((ticket, seat, {"slot": seat.place, **request}))
        return ticket

    def _leave(self, slot: int) -> None:
        if (seat := self._seats.pop(slot, None)) is not None:
            seat.open = False
            seat.worker.seats.discard(seat)
            seat.worker.free.append(seat.place)
