"""A pool of worker processes, each the host of some environments, with a thread each and one queue of what came of it.

The caller's engine may put its answers into the same queue (`post`), so that one thread waits for both.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from autorl_hpc.rollouts.desk import Desk
from autorl_hpc.rollouts.hosting import Lost, Reply, Worker
from autorl_hpc.rollouts.source import EnvironmentBroken, Source

CALL_LIMIT_S = 120.0
"""Of one call. A step takes milliseconds and the slowest reset known (a game's translation) seconds; a machine may be busy."""

START_LIMIT_S = 300.0
"""Until a new worker is ready: Python and libraries cold from a busy shared file system."""


CLOSING_S = 10.0
"""For all threads together to end once their processes are killed."""


class Note(NamedTuple):
    """Something that another than the pool's workers has posted.

    Attributes:
        sender: who; notes of an earlier run are known by it.
        key, content: as posted.
    """

    sender: object
    key: int
    content: Any


class Pool:
    """Environments of one source in up to `workers` processes, which start when they are first needed.

    Attributes:
        size: how many processes at most.
    """

    def __init__(
        self,
        source: Source,
        workers: int = 2,
        *,
        call_limit_s: float = CALL_LIMIT_S,
        start_limit_s: float = START_LIMIT_S,
    ) -> None:
        self.source, self.size = source, max(1, workers)
        self._events: queue.SimpleQueue[Reply | Lost | Note | EnvironmentBroken] = queue.SimpleQueue()
        self._desk = Desk(self.size)
        self._workers = [
            Worker(number, source, self._desk, self._events.put, call_limit_s, start_limit_s)
            for number in range(self.size)
        ]
        for worker in self._workers:
            worker.start()

    @property
    def pids(self) -> list[int]:
        """Processes that are up."""
        return [process.pid for worker in self._workers if (process := worker.process) is not None]

    def worker_of(self, slot: int) -> int | None:
        """The number of the worker that hosts a slot's episode, None where it is not begun."""
        return self._desk.worker_of(slot)

    def begin(self, slot: int, goal: Mapping[str, Any], seed: int) -> int:
        """Asks for an episode's beginning in a slot; the ticket comes back in the event."""
        return self._desk.begin(slot, goal, seed)

    def act(self, slot: int, completion: str, *, last: bool = False) -> int:
        """Asks for one step of the episode in a slot, by the model's words. `last`: no prompt is wanted after it."""
        return self._desk.act(slot, {"completion": completion, "last": last})

    def release(self, slot: int) -> None:
        """Gives a slot's episode up; what was asked for it and is not begun is dropped."""
        self._desk.release(slot)

    def held_up(self) -> list[int]:
        """Slots that wait behind slow or hanging episodes of others, and would not elsewhere. None where the environment says
        that it can't be played again (`replays = False`)."""
        return self._desk.held_up() if all(worker.replays for worker in self._workers) else []

    def post(self, note: Note) -> None:
        """Puts a note into the queue of events, from any thread."""
        self._events.put(note)

    def next(self, timeout_s: float | None = None) -> Reply | Lost | None:
        """The next event of a worker, None if there was none in time. Notes are passed over.

        Raises:
            EnvironmentBroken: a worker could not make an environment.
        """
        while isinstance(event := self.hear(timeout_s), Note):
            pass
        return event

    def hear(self, timeout_s: float | None = None) -> Reply | Lost | Note | None:
        """The same with notes."""
        try:
            event = self._events.get_nowait() if timeout_s == 0.0 else self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(event, EnvironmentBroken):
            raise event
        return event

    def close(self) -> None:
        """Ends all processes."""
        self._desk.close()
        for worker in self._workers:
            worker.end()
        deadline = time.monotonic() + CLOSING_S
        for worker in self._workers:
            worker.join(timeout=max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
