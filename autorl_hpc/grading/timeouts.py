"""What may end a grader, and what may not."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.processes import Cancellable

log = logging.getLogger("autorl_hpc.grader")


class Stopped(BaseException):
    """A signal asks the grader to stop. Not KeyboardInterrupt: raised inside an import of torch, that one makes Python
    kill itself at its end though it was caught."""


class WouldEnd(Exception):
    """Something that the grader called would have ended it: SystemExit, a panic of compiled code."""


@contextmanager
def contained() -> Iterator[None]:
    """Lets nothing but a signal end the grader.

    Raises:
        WouldEnd: in place of an error that is no Exception.
    """
    try:
        yield
    except (Exception, Stopped, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise WouldEnd(f"{type(error).__name__}: {error}") from error


def each(*steps: Callable[[], object]) -> None:
    """Takes all steps; one that fails is told in the log and keeps none from being taken."""
    for step in steps:
        try:
            with contained():
                step()
        except Exception:
            log.exception("while ending")


# A rating that may never end, waited for no longer than a limit.
#
# Ratings have limits of their own: of a program, of a judge's answer, of one call of a task's `evaluate`. Should one of these not hold,
# all runs would wait behind one submission, for a grader whose heart beats on. So each rating as a whole has a limit too. What is
# overdue is given up: what it has running is ended (scoring/giving_up.py), and if its thread goes on all the same, nobody takes what
# it may still find.

TICK_S = 1.0
"""The wait is counted in ticks of this length: a job that was suspended and goes on has not waited all the while."""

RATED_AT_ONCE = 4
"""Ratings at once at most, those of the suite's own scorers: they share the cores, so each may take so many times as long."""

END_S = 5.0
"""For a rating that is given up, to end what it has running and to remove its files: a moment, unless it hangs."""

T = TypeVar("T")


class RatingOverdue(Exception):
    """A scorer of the suite did not come to an end: by the artifact's doing, or the node's; who is to blame has to be found out."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"the answers were not rated within {limit_s:g} s")
        self.limit_s = limit_s


class GraderOverdue(AutorlError):
    """A judge, a task's own scorer, or the rating of the base model's answers did not come to an end: never an artifact's fault.
    Its cause is the `RatingOverdue`."""


def overdue_s(error: BaseException | None) -> float:
    """The limit that a rating exceeded, if the error came of that, be it by way of others; else 0."""
    while error is not None and not isinstance(error, RatingOverdue):
        error = error.__cause__
    return 0.0 if error is None else error.limit_s


class _Rating(threading.Thread, Generic[T]):
    """The thread of one rating."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__(name="rating", daemon=True)
        self._work = work
        self._ending = Cancellable()
        self.found: list[T] = []
        self.problem: BaseException | None = None

    def run(self) -> None:
        self._ending.of_this_thread()
        try:
            self.found.append(self._work())
        except BaseException as error:  # SystemExit too: the caller is told
            self.problem = error

    def give_up(self) -> None:
        """Ends what it has running, and waits a moment for its own end."""
        threading.Thread(target=self._ending.end, name="ending", daemon=True).start()  # that may hang, too
        if self.is_alive():  # a signal may come before its start
            self.join(END_S)


def within(limit_s: float, work: Callable[[], T]) -> T:
    """What `work` returns or raises, by a thread of its own. It is given up when it is overdue, and when the caller is broken off.

    Raises:
        RatingOverdue: it takes longer.
    """
    rating = _Rating(work)
    try:
        rating.start()
        waited_s = 0.0
        while rating.is_alive():
            if waited_s >= limit_s:
                raise RatingOverdue(limit_s)
            began = time.monotonic()
            rating.join(min(TICK_S, limit_s - waited_s))
            waited_s += min(time.monotonic() - began, 2 * TICK_S)
    except BaseException:  # a signal's too
        rating.give_up()
        raise
    if rating.problem is not None:
        raise rating.problem
    return rating.found[0]


def under_way() -> list[_Rating[object]]:
    """The ratings of this process that go on, also those that were given up and do not end."""
    return [thread for thread in threading.enumerate() if isinstance(thread, _Rating)]


def give_up_all() -> None:
    """Gives up whatever is being rated."""
    for rating in under_way():
        rating.give_up()
