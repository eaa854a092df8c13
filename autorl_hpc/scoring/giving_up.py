"""How work that nobody waits for any more comes to its end: what it waits for is ended, be it programs, a task's own processes or
requests to a judge.

A thread can't be ended from outside. Where one does work that may be given up, whatever it starts says by `ended_by` how that is
ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class GivenUp(Exception):
    """Nobody waits any more for the work that this thread does."""


class Ending:
    """Of one piece of work. `end` is for another thread than the one that works."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ways: list[Callable[[], None]] = []
        self._over = False

    def of_this_thread(self) -> None:
        """The work is what this thread does from now on."""
        _ENDING.set(self)

    def end(self) -> None:
        """Ends what is under way; nothing further can be begun."""
        with self._lock:
            self._over = True
            for way in self._ways:
                way()

    def add(self, way: Callable[[], None]) -> None:
        """Raises GivenUp if it is over."""
        with self._lock:
            if self._over:
                raise GivenUp
            self._ways.append(way)

    def remove(self, way: Callable[[], None]) -> None:
        """It is no longer called."""
        with self._lock:
            self._ways.remove(way)


_ENDING: ContextVar[Ending | None] = ContextVar("ending", default=None)


@contextmanager
def ended_by(way: Callable[[], None]) -> Iterator[None]:
    """What is under way is ended by `way`, called by another thread, if the work of this thread is given up.

    Raises:
        GivenUp: it was given up before.
    """
    ending = _ENDING.get()
    if ending is None:
        yield
        return
    ending.add(way)
    try:
        yield
    finally:
        ending.remove(way)
