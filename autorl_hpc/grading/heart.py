"""A grader's heartbeat: a counter in a file, written by a thread of its own while the grader is at work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from autorl_hpc.files.claims import write_heartbeat
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.records.exchange import Heartbeat

log = logging.getLogger("autorl_hpc.grader")

BEATS_PER_STALENESS = 6
"""A heartbeat may be late five times before its claims are taken over."""

MAX_BEAT_S = 5.0
"""Each heartbeat is a synced write on a shared file system: no more of them than staleness needs."""


class Heart(threading.Thread):
    """Writes the heartbeat; says whether it could.

    Args:
        look: called with each beat. It notes what has come into the queue, so that a wait is not counted from the end of a long
            evaluation on.
    """

    def __init__(
        self, experiment: ExperimentDir, beat: Heartbeat, stale_after_s: float, look: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.experiment = experiment
        self.beat = beat
        self.period_s = min(MAX_BEAT_S, stale_after_s / BEATS_PER_STALENESS)
        self.look = look
        self._ending = threading.Event()  # not `_stop`: that is a method of Thread before Python 3.13
        self._lock = threading.Lock()

    def set(self, **changes: object) -> None:
        """Changes fields of the next beat."""
        with self._lock:
            self.beat = self.beat.model_copy(update=changes)

    def write(self) -> None:
        """One beat now."""
        with self._lock:
            self.beat = self.beat.model_copy(update={"counter": self.beat.counter + 1})
            try:
                write_heartbeat(self.experiment.graders, self.beat)
            except OSError as error:
                log.warning("heartbeat not written: %s", error)

    def run(self) -> None:
        while not self._ending.wait(self.period_s):
            self.write()
            try:
                self.look()
            except Exception as error:  # the heart beats on, whatever can't be listed
                log.warning("the queue can't be looked at: %s", error)

    def end(self) -> None:
        """The last beat."""
        self._ending.set()
        self.set(state="ended", working_on=None)
        self.write()
