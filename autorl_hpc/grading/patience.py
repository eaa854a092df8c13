"""A rating that may never end, waited for no longer than a limit.

Ratings have limits of their own: of a program, of a judge's answer, of one call of a task's `evaluate`. Should one of these not hold,
all runs would wait behind one submission, for a grader whose heart beats on. So each rating as a whole has a limit too. What is
overdue is given up: its thread goes on by itself, and nobody takes what it may still find.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from autorl_hpc.errors import AutorlError

TICK_S = 1.0
"""The wait is counted in ticks of this length: a job that was suspended and goes on has not waited all the while."""

T = TypeVar("T")


class RatingOverdue(Exception):
    """A scorer of the suite did not come to an end: by the artifact's doing, or the node's; who is to blame has to be found out."""


class OutsideOverdue(AutorlError):
    """A judge, or a task's own scorer, did not come to an end: never the artifact's fault."""


def within(limit_s: float, work: Callable[[], T]) -> T:
    """What `work` returns or raises, by a thread of its own.

    Raises:
        RatingOverdue: it takes longer. It can't be ended, only be left alone.
    """
    found: list[T] = []
    problem: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # SystemExit too: the caller is told
            problem.append(error)

    thread = threading.Thread(target=run, name="rating", daemon=True)
    thread.start()
    waited_s = 0.0
    while thread.is_alive():
        if waited_s >= limit_s:
            raise RatingOverdue(f"the answers were not rated within {limit_s:g} s")
        began = time.monotonic()
        thread.join(min(TICK_S, limit_s - waited_s))
        waited_s += min(time.monotonic() - began, 2 * TICK_S)
    if problem:
        raise problem[0]
    return found[0]
