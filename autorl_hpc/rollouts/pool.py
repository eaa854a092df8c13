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


class _Call(NamedTuple):
    ticket: int
    seat: _Seat
    request: Mapping[str, Any]


class EnvironmentProcess(threading.Thread):
    """Owns one process at a time, with JSON lines over pipes; replaces a process that dies or exceeds the time limit. It ends
    with its children, and with its starter."""

    def __init__(self, number: int, pool: Pool) -> None:
        super().__init__(name=f"environments-{number}", daemon=True)
        self.number, self._pool = number, pool
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        source = pool.source
        first = {**vars(source), "file": str(source.file), "data": str(source.data), "options": dict(source.options)}
        env = _inherited(source.held_out)
        self.child = Child(f"{PACKAGE}.worker", env, first, START_LIMIT_S, pool.call_limit_s)
        self.seats: set[_Seat] = set()
        self._free: list[int] = []  # places that once hosted an episode
        self._ended = False

    def seat(self, slot: int) -> _Seat:
        """Return a place for a new episode; call it under the pool's lock, as `leave` and `lose`."""
        seat = _Seat(self, slot, self._free.pop() if self._free else len(self.seats))
        self.seats.add(seat)
        return seat

    def leave(self, seat: _Seat) -> None:
        """Drop an episode with its pending calls."""
        seat.open = False
        self.seats.discard(seat)
        self._free.append(seat.place)

    def lose(self) -> tuple[int, ...]:
        """Drop all episodes, because their process is gone; return their slots."""
        lost = list(self.seats)
        for seat in lost:
            self.leave(seat)
        self._free = []
        return tuple(sorted(seat.slot for seat in lost))

    def run(self) -> None:
        while (call := self.calls.get()) is not None and not self._ended:
            if not call.seat.open:
                continue
            event: Event
            try:
                event = Reply(call.ticket, **self.child.call(call.request))
            except Exception as error:  # any error must be reported, or the caller would wait for ever
                self.child.end()
                slots = self._pool.lose(self)
                event = Lost(self.number, call.ticket, f"the environment {error}"[:500], slots)
                if isinstance(error, ChildFailed) and error.starting:
                    event = EnvironmentBroken(f"{self._pool.source.file} can't be used: {error}")
            self._pool.post(event)
        self.child.end()

    def end(self) -> None:
        """Kill the process, even during a call; the thread ends then."""
        self._ended = True
        self.child.kill()
        self.calls.put(None)


def _inherited(held_out: bool) -> dict[str, str]:
    """Return our environment; for a grader without secrets and without GPUs, which belong to the engine."""
    if not held_out:
        return dict(os.environ)
    kept = {name: value for name, value in os.environ.items() if not SECRET.search(name)}
    return {**kept, "CUDA_VISIBLE_DEVICES": ""}


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
            seat = self._seats[slot] = self._worker_for(str(goal.get("id", ""))).seat(slot)
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
            slots = worker.lose()
            for slot in slots:
                del self._seats[slot]
            self._knows = {goal: knows for goal, knows in self._knows.items() if knows is not worker}
            return slots

    def post(self, event: Event) -> None:
        """Put an event into the queue, from any thread."""
        self._events.put(event)

    def next(self, timeout_s: float | None = None) -> Reply | Lost | None:
        """Return the next event of a worker, skipping notes; None if there was none in time. Raises EnvironmentBroken: a worker
        could not create an environment."""
        while isinstance(event := self.hear(timeout_s), Note):
            pass
        return event

    def hear(self, timeout_s: float | None = None) -> Reply | Lost | Note | None:
        """Return the next event or note; otherwise like `next`."""
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
            seat.worker.calls.put(_Call(ticket, seat, {"slot": seat.place, **request}))
        return ticket

    def _leave(self, slot: int) -> None:
        seat = self._seats.pop(slot, None)
        if seat is not None:
            seat.worker.leave(seat)

    def _worker_for(self, goal: str) -> EnvironmentProcess:
        idlest = min(self._workers, key=lambda worker: len(worker.seats))
        worker = self._knows.get(goal, idlest)
        if len(worker.seats) > len(idlest.seats) + LEAD:
            worker = idlest
        self._knows[goal] = worker
        return worker
