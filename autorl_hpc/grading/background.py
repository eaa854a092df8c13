"""Background work of a grader, the time limit of a rating, and containment of errors that would end the grader."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.processes import Cancellable

log = logging.getLogger("autorl_hpc.grader")
T = TypeVar("T")


class Stopped(BaseException):
    """A signal asks the grader to stop. KeyboardInterrupt is not used: raised while torch is imported, it makes Python kill
    itself at exit even if it was caught."""


class WouldEnd(Exception):
    """Called code would have ended the grader: SystemExit, or a panic of compiled code."""


@contextmanager
def contained() -> Iterator[None]:
    """Let nothing but a stop signal end the grader. Raises WouldEnd: instead of an error that is not an Exception."""
    try:
        yield
    except (Exception, Stopped, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise WouldEnd(f"{type(error).__name__}: {error}") from error


def each(*steps: Callable[[], object]) -> None:
    """Run all steps; log a failing step and go on."""
    for step in steps:
        try:
            with contained():
                step()
        except Exception:
            log.exception("while ending")


# --- work beside the grader's own thread: ratings, commits, fingerprints

RATED_AT_ONCE = 4
"""Parallel ratings by the suite's own scorers. They share the cores, so each limit is longer by this factor."""


@dataclass(frozen=True)
class Finished:
    """The result of one piece of background work, or its error."""

    name: str
    generation: int
    result: object


class Background:
    """Queue entries on which threads work while the grader goes on. Use it only from the grader's own thread."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._results: queue.SimpleQueue[Finished] = queue.SimpleQueue()

    def is_full(self, name: str) -> bool:
        """Return whether the work on an entry can't start: one fingerprint, and three ratings beside one in the grader's thread."""
        kind = [other for other in self.names if other[:2] == name[:2]]
        return len(kind) >= (1 if name.startswith("p-") else RATED_AT_ONCE - 1)

    def start(self, name: str, generation: int, work: Callable[[], object]) -> None:
        """Start `work` for an entry in a thread."""

        def finish() -> None:
            result: object
            try:
                with contained():
                    result = work()
            except BaseException as error:
                result = error
            self._results.put(Finished(name, generation, result))

        self.names.append(name)
        # a daemon, because Python would wait for an executor's threads at its end
        threading.Thread(target=finish, name="finishing", daemon=True).start()

    def collect(self, timeout_s: float | None = 0.0) -> Finished | None:
        """Return what is finished, or None if nothing is within `timeout_s` (None: wait without limit)."""
        if not self.names:
            return None
        try:
            found = self._results.get(timeout_s is None or timeout_s > 0.0, timeout_s or None)
        except queue.Empty:
            return None
        self.names.remove(found.name)
        return found


# --- time limit of a rating
# The limits of single calls may fail to act, so each rating has a limit as a whole too. An overdue rating is abandoned: its processes
# are ended (`Cancellable`), and if its thread goes on, its result is ignored.

TICK_S = 1.0  # The wait is counted in ticks of this length, so that the time of a suspended job does not count
END_S = 5.0  # Seconds for an abandoned rating to end its processes and remove its files


class RatingOverdue(Exception):
    """A scorer of the suite exceeded its limit; the artifact or the node may be the cause."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"the answers were not rated within {limit_s:g} s")
        self.limit_s = limit_s


class GraderOverdue(AutorlError):
    """A judge, a task's own scorer, or a rating of the base model exceeded its limit; never the artifact's fault.
    Its cause is the `RatingOverdue`."""


def overdue_s(error: BaseException | None) -> float:
    """Return the limit in seconds if the error was caused by a RatingOverdue; otherwise 0."""
    while error is not None and not isinstance(error, RatingOverdue):
        error = error.__cause__
    return 0.0 if error is None else error.limit_s


class _Rating(threading.Thread, Generic[T]):
    def __init__(self, work: Callable[[], T], end_s: float) -> None:
        super().__init__(name="rating", daemon=True)
        self._work, self._end_s, self._ending = work, end_s, Cancellable()
        self.found: list[T] = []
        self.problem: BaseException | None = None

    def run(self) -> None:
        self._ending.of_this_thread()
        try:
            self.found.append(self._work())
        except BaseException as error:  # SystemExit too: the caller raises it
            self.problem = error

    def give_up(self) -> None:
        """End the rating's processes and wait briefly for its thread."""
        # in a thread, because this may hang too
        threading.Thread(target=self._ending.end, name="ending", daemon=True).start()
        if self.is_alive():  # a signal may arrive before its start
            self.join(self._end_s)


def within(limit_s: float, work: Callable[[], T], end_s: float = END_S) -> T:
    """Run `work` in a thread and return its result or raise its error. Abandons it at the limit or if the caller is
    interrupted. Raises RatingOverdue: it exceeds the limit."""
    rating = _Rating(work, end_s)
    try:
        rating.start()
        waited_s = 0.0
        while rating.is_alive():
            if waited_s >= limit_s:
                raise RatingOverdue(limit_s)
            began = time.monotonic()
            rating.join(min(TICK_S, limit_s - waited_s))
            waited_s += min(time.monotonic() - began, 2 * TICK_S)
    except BaseException:  # also a stop signal
        rating.give_up()
        raise
    if rating.problem is not None:
        raise rating.problem
    return rating.found[0]


def under_way() -> list[_Rating[object]]:
    """Return this process's running ratings, including abandoned ones."""
    return [thread for thread in threading.enumerate() if isinstance(thread, _Rating)]


def give_up_all() -> None:
    """Abandon all running ratings."""
    for rating in under_way():
        rating.give_up()
