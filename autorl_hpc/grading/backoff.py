"""When an entry that failed is tried again: less and less often, whichever grader tries it.

How often it failed stands on disk; the wait is measured by each grader's own clock from when it first saw the entry, or failed at
it. Nothing is decided by another host's clock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from autorl_hpc.files.troubles import MAX_CHARS, drop_trouble, read_trouble, write_trouble
from autorl_hpc.records.exchange import Trouble
from autorl_hpc.states import Fault

RETRY_AFTER_TROUBLE_S = 5.0
MAX_RETRY_S = 120.0
"""An entry that fails again and again is tried less and less often: one bad cell must not cost the others their grader."""

DEATHS_BEFORE_LAST = 2
"""Graders that died at an entry before it waits behind all others. One may have been preempted."""


def pause_s(failures: int) -> float:
    """The wait after that many failures."""
    return min(MAX_RETRY_S, RETRY_AFTER_TROUBLE_S * 2.0 ** min(failures - 1, 10)) if failures > 0 else 0.0


@dataclass
class Backoff:
    """The waits of one grader's entries."""

    folder: Path
    grader: str
    _not_before: dict[str, float] = field(default_factory=dict)
    _failures: dict[str, int] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)
    _owed: set[str] = field(default_factory=set)  # waits that began before this grader: it has not tried them yet

    def order(self, names: list[str], deaths: dict[str, int]) -> list[str]:
        """Entries at which graders died again and again come last, else the order stays.

        Args:
            deaths: graders that hold an entry or died at it.
        """
        return sorted(names, key=lambda name: max(0, deaths.get(name, 0) - DEATHS_BEFORE_LAST + 1))

    def waits(self, name: str, deaths: int) -> bool:
        """Whether the entry is not to be tried yet."""
        if name not in self._seen:
            self._seen.add(name)
            known = read_trouble(self.folder, name)
            self._failures[name] = known.failures if known else 0
            wait_s = pause_s(max(self._failures[name], deaths - DEATHS_BEFORE_LAST + 1))
            if wait_s:
                self._owed.add(name)
                self.later(name, wait_s)
        return self._not_before.get(name, 0.0) > time.monotonic()

    def owes(self, names: list[str]) -> bool:
        """Whether a wait that an earlier grader began is not over: a grader that ended now would only begin it anew."""
        self._owed &= set(names)
        return bool(self._owed)

    def later(self, name: str, wait_s: float) -> None:
        """Not before so many seconds."""
        self._not_before[name] = time.monotonic() + wait_s

    def now(self, name: str) -> None:
        """It may be tried at once: what it waited for is there."""
        self._not_before.pop(name, None)

    def failed(self, name: str, problem: str, fault: Fault, least_s: float = 0.0) -> float:
        """Notes a failure, here and on disk; the wait in seconds, `least_s` at least."""
        known = read_trouble(self.folder, name)  # another grader may have tried meanwhile
        self._failures[name] = max(self._failures.get(name, 0), known.failures if known else 0) + 1
        self._seen.add(name)
        self._owed.discard(name)
        wait_s = max(least_s, pause_s(self._failures[name]))
        self.later(name, wait_s)
        note = Trouble(
            entry=name, failures=self._failures[name], fault=fault, problem=problem[:MAX_CHARS], grader=self.grader
        )
        write_trouble(self.folder, note)
        return wait_s

    def tried(self, name: str) -> None:
        """It was tried, and neither failed nor came through."""
        self._owed.discard(name)

    def well(self, name: str) -> None:
        """It came through."""
        self._failures.pop(name, None)
        drop_trouble(self.folder, name)
        self._not_before.pop(name, None)
        self._owed.discard(name)
        self._seen.discard(name)
