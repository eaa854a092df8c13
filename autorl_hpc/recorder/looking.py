"""Each watch has a thread of its own, in which it is looked at again and again: one that fails or hangs stops no other."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from autorl_hpc.files.events import append_event
from autorl_hpc.files.ledger import now_text
from autorl_hpc.recorder.watch import Moment, Watch
from autorl_hpc.records.names import printable

log = logging.getLogger("autorl_hpc.recorder")

BEAT_S = 0.5
"""Watches wake soon after each other, at multiples of this and a little later: a core whose caches have gone elsewhere takes 0.2 ms
for the first of them and much less for the next."""

APART_S = 0.006
"""Between two watches of one beat: at once they would wait for each other."""

SLOWEST_S = 60.0
"""The longest pause after failures: a disk that was full may have room again."""

TROUBLE_EVERY_S = 60.0
MAX_TROUBLES = 200
"""Written in one process: the events must stay readable, whatever an agent does to its files."""

HANGS_S = 60.0
"""A look of this length is told of."""


class Elapsed:
    """The budget used, as the supervisor last told it, and our own monotonic clock since. Thread-safe.

    Args:
        at_s: when it was told, by the monotonic clock, which all processes of a host share.
        suspension_s: a longer gap between two ticks doesn't count.
    """

    def __init__(
        self, elapsed_s: float, at_s: float, suspension_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._elapsed_s, self._suspension_s, self._now = elapsed_s, suspension_s, now
        self._last = min(at_s, now())
        self._lock = threading.Lock()

    def tick(self) -> float:
        """Adds the time since the last tick; the sum."""
        with self._lock:
            now = self._now()
            gap, self._last = now - self._last, now
            if gap <= self._suspension_s:
                self._elapsed_s += gap
            return self._elapsed_s

    def told(self, elapsed_s: float) -> None:
        """The supervisor's clock, which is the one that counts; it never goes back."""
        with self._lock:
            self._elapsed_s, self._last = max(self._elapsed_s, elapsed_s), self._now()


@dataclass
class Troubles:
    """Writes `recorder_trouble` events, a few of each watch. Thread-safe enough: one line is one write."""

    events: Path
    _next_s: dict[str, float] = field(default_factory=dict)
    _unsaid: dict[str, int] = field(default_factory=dict)
    _said: int = 0

    def say(self, watch: str, message: str) -> None:
        """Tells of a trouble, unless the same watch had one within a minute."""
        log.warning("%s: %s", watch, message)
        now = time.monotonic()
        if now < self._next_s.get(watch, 0.0) or self._said >= MAX_TROUBLES:
            self._unsaid[watch] = self._unsaid.get(watch, 0) + 1
            return
        self._next_s[watch] = now + TROUBLE_EVERY_S
        self._said += 1
        unsaid = self._unsaid.pop(watch, 0)
        append_event(
            self.events, "recorder_trouble", watch=watch, message=printable(message)[:500], unsaid_before=unsaid
        )


def to_beat(pause_s: float, now_s: float) -> float:
    """Seconds from `now_s` to the beat that is nearest to the end of a pause; a pause shorter than BEAT_S stays as it is."""
    if pause_s < BEAT_S:
        return pause_s
    beat_s = round((now_s + pause_s) / BEAT_S) * BEAT_S
    return beat_s - now_s if beat_s > now_s + BEAT_S / 4 else pause_s


class Looker(threading.Thread):
    """Looks at one watch until it is told to end; then closes it.

    Args:
        make: makes the watch; tried again as a look is, when it fails.
        place: among the watches, from 0.
    """

    def __init__(
        self, name: str, make: Callable[[], Watch], elapsed: Elapsed, attempt: int, troubles: Troubles, place: int = 0
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.watch: Watch | None = None
        self.closed_well = False
        self._make, self._elapsed, self._attempt, self._troubles = make, elapsed, attempt, troubles
        self._wake, self._ending = threading.Event(), threading.Event()
        self._later_s = place * APART_S
        self._begun_s: float | None = None
        self._failures = 0

    def wake(self) -> None:
        """Has it looked at now."""
        self._wake.set()

    def end(self) -> None:
        """Has it closed after the present look."""
        self._ending.set()
        self._wake.set()

    def run(self) -> None:
        while True:  # once at least: an agent may live for less time than this process takes to start
            pause_s = self._look()
            if self._ending.is_set():
                break
            self._wake.wait(to_beat(pause_s, time.monotonic() - self._later_s))
            if self._ending.is_set():
                break
            self._wake.clear()
        if self.watch is None:
            return
        try:
            self.watch.close(self._moment())
            self.closed_well = True
        except Exception as error:
            self._trouble(error)

    def hangs(self) -> None:
        """Tells of a look that takes too long."""
        begun_s = self._begun_s
        if begun_s is not None and time.monotonic() - begun_s > HANGS_S:
            self._troubles.say(self.name, f"a look has been going on for {time.monotonic() - begun_s:.0f} s")

    def _look(self) -> float:
        """One look; seconds until the next."""
        self._begun_s = time.monotonic()
        try:
            if self.watch is None:
                self.watch = self._make()
            self.watch.look(self._moment())
            self._failures = 0
            return self.watch.every_s
        except Exception as error:
            self._failures += 1
            self._trouble(error)
            least_s = 1.0 if self.watch is None else max(1.0, self.watch.every_s)
            return min(SLOWEST_S, least_s * 2.0 ** min(self._failures, 10))
        finally:
            self._begun_s = None

    def _trouble(self, error: Exception) -> None:
        self._troubles.say(self.name, f"{type(error).__name__}: {error}")

    def _moment(self) -> Moment:
        return Moment(round(self._elapsed.tick(), 3), now_text(), self._attempt)
