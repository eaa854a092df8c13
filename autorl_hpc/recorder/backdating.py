"""When a file that a walk found only now was written: by its own time, between the walk before and now."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from autorl_hpc.recorder.watch import Moment


class Backdating:
    """Remembers when walks ended.

    A file's time may come from another host's clock, or be set by its owner. So it is believed only within what is known: the file
    was not there, or not like this, in the walk before, and it is there now.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._walks = 0
        self._ends: deque[float] = deque([0.0], maxlen=3)

    def tick(self, walks: int, now: Moment) -> None:
        """Tells how many walks have ended by now."""
        if walks != self._walks:
            self._walks = walks
            self._ends.append(now.elapsed_s)

    def moment(self, mtime_s: float, now: Moment) -> Moment:
        """When a file with this time, met on the present walk or the last, was written.

        Args:
            mtime_s: seconds since the epoch, by the file system.
        """
        age_s = max(0.0, self._clock() - mtime_s)
        # The last end but one: by then the walk before the one that met it had begun at the earliest.
        earliest_s = self._ends[0] if len(self._ends) == 3 else 0.0
        return replace(now, elapsed_s=round(min(now.elapsed_s, max(earliest_s, now.elapsed_s - age_s)), 3))
