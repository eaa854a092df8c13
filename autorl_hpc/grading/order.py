"""Which entry of the queue a grader takes next. No leader: each grader orders what it lists by the same rules.

Agents wait for feedback while their budget runs; ended runs wait for their closing, for the sake of people and disks. Neither may
starve the other. An engine is dear to change and cheap to keep: so a grader stays with what its engine can do, for a while.
All waits are measured by this process's own clock from when it first listed an entry.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from autorl_hpc.files.queue import is_waited_for, number_of, run_of

CLOSINGS_FIRST_S: Final = 30.0
"""Closings come first as long as no submission waits longer than this: half of the minute after which an agent's waiting is given
back to its budget, so that what is under way can end before that."""

CLOSING_EVERY: Final = 4
"""While submissions wait longer, every so many turns are a closing's (or of a fingerprint that one waits for): a quarter of a busy
grader closes runs at the pace at which they end, most often, and costs those who wait a third more."""

BACKGROUND_EVERY: Final = 16
"""And so many are of what nobody waits for: artifacts on the disk go only once they are fingerprinted."""

FINGERPRINT_TURN_S: Final = 10.0
"""A fingerprint that a closing waits for may keep submissions that wait too long from their turn for so long; then it goes on at its
next one. What is computed stays."""

ENGINE_PATIENCE_S: Final = 120.0
"""A grader stays with its engine until somebody who needs another one has waited for so long, and it with the next one for as long:
an engine takes up to a minute to start, so at most a third of the time goes into changes."""

ATTENDED_FACTOR: Final = 3
"""So much more patience where another grader is at such entries already. It may have died: never for ever."""

LEAD: Final = 3
"""A run that was served less than another over the life of the queue is at most so many turns ahead of it. Without a limit a run
that began late kept all others waiting until it had caught up."""

CLAIM_OF_CLOSING, CLAIM_OF_SUBMISSION, CLAIM_OF_BACKGROUND = 0, 1, 2


@dataclass
class _Seen:
    """An entry that is listed."""

    since_s: float
    serial: int
    turn: float = 0.0  # a submission's: the lower, the sooner


@dataclass
class Order:
    """The order of one grader. Thread-safe: the heartbeat looks at the queue, too, while the grader is at work.

    Args:
        group_of: the engine that an entry needs, None for none (or if that can't be told).
        served_before: how many submissions of a run were scored before this grader knew of it.
        salt: tells graders apart, so that they begin at different groups.
    """

    group_of: Callable[[str], str | None] = lambda name: None
    served_before: Callable[[str], int] = lambda run: 0
    salt: str = ""
    clock: Callable[[], float] = time.monotonic
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _served: dict[str, int] = field(default_factory=dict)
    _last_turn: dict[str, float] = field(default_factory=dict)  # by run: of its newest submission
    _now: dict[str | None, float] = field(default_factory=dict)  # by group: the turn that it has come to
    _serial: int = 0
    _without_closing: int = 0
    _without_background: int = 0
    _warm: str | None = None
    _warm_since_s: float = 0.0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def look(self, names: Collection[str]) -> None:
        """Notes what has come since the last look, and what is gone: some grader has done it."""
        with self._lock:
            for name in self._seen.keys() - set(names):
                self._gone(name)
            new = [name for name in names if name not in self._seen]
            runs = {run_of(name) for name in new if _is_submission(name)} - self._served.keys()
            self._served.update({run: self.served_before(run) for run in runs})
            backlog = {run_of(name) for name in self._seen if _is_submission(name)}
            least = min((self._served[run_of(n)] for n in names if _is_submission(n)), default=0)
            for name in sorted(new, key=lambda name: (number_of(name), name)):
                self._serial += 1
                turn = self._turn(name, backlog, least) if _is_submission(name) else 0.0
                self._seen[name] = _Seen(self.clock(), self._serial, turn)

    def waited_s(self, name: str) -> float | None:
        """Since this grader first listed it; None if it has not, or no longer."""
        with self._lock:
            seen = self._seen.get(name)
            return None if seen is None else self.clock() - seen.since_s

    def began(self, name: str) -> None:
        """Notes a turn that this grader gave to an entry."""
        with self._lock:
            if name.startswith(("c-", "p-")):
                self._without_closing = 0
            else:
                self._without_closing += 1
            self._without_background = 0 if name.startswith(("b2-", "p-")) else self._without_background + 1
            self._come_to(name)

    def presses(self, names: Iterable[str]) -> bool:
        """Whether a submission or its baseline has waited for too long for closings to come first."""
        with self._lock:
            return any(
                is_waited_for(name) and self.clock() - self._seen[name].since_s > CLOSINGS_FIRST_S
                for name in names
                if name in self._seen
            )

    def sort(
        self,
        names: Collection[str],
        claimed: Mapping[str, int] | None = None,
        warm: str | None = None,
        under_way: Collection[str] = (),
    ) -> list[str]:
        """The names in the order they should be tried; closings that can't be ready yet are left out.

        Args:
            claimed: entries that graders are at.
            warm: the group of the engine that is up.
            under_way: entries that this grader itself is finishing; they are listed until they are done, and counted once.
        """
        with self._lock:
            self.look(names)
            if warm != self._warm:
                self._warm, self._warm_since_s = warm, self.clock()
            free = [name for name in names if name not in (claimed or {})]
            ending = {run_of(name) for name in names if name.startswith("c-")}
            due = {run_of(name) for name in names if name.startswith(("f-", "p-"))}
            groups = {name: self.group_of(name) for name in names if not name.startswith("p-")}
            ranks = self._group_ranks(free, groups, {groups.get(n) for n in claimed or {} if n not in under_way})
            kinds = self._kind_ranks(self.presses(free))

            def rank(name: str) -> tuple[int, int, int, float, int]:
                seen = self._seen[name]
                kind, late = kinds[_kind(name, ending)]
                group = ranks.get(groups.get(name), 0) if groups.get(name) is not None else 0
                return late, group, kind, (0.0 if name.startswith("b1-") else 1.0 + seen.turn), seen.serial

            return sorted((n for n in names if not (n.startswith("c-") and run_of(n) in due)), key=rank)

    def _kind_ranks(self, pressed: bool) -> dict[int, tuple[int, int]]:
        """Of closings, submissions and the rest: the rank inside of a group, and whether they come after all groups."""
        closings_first = not pressed or self._without_closing >= CLOSING_EVERY - 1
        background_first = self._without_background >= BACKGROUND_EVERY - 1
        return {
            CLAIM_OF_CLOSING: (1 if closings_first else 3, 0),
            CLAIM_OF_SUBMISSION: (2, 0),
            CLAIM_OF_BACKGROUND: (0, 0) if background_first else (4, 1),
        }

    def _group_ranks(
        self, free: Iterable[str], groups: Mapping[str, str | None], attended: Collection[str | None]
    ) -> dict[str | None, int]:
        """Which engine's entries come first: the one that is up, but for those who have waited too long for another."""
        longest: dict[str, float] = {}
        for name in free:
            group = groups.get(name)
            if group is not None and not name.startswith("b2-"):
                longest[group] = max(longest.get(group, 0.0), self.clock() - self._seen[name].since_s)
        others = sorted(
            (group for group in set(groups.values()) if group is not None and group != self._warm),
            key=lambda group: (group in attended, -round(longest.get(group, -1.0)), _draw(self.salt, group)),
        )
        first = [self._warm]
        if self.clock() - self._warm_since_s > ENGINE_PATIENCE_S:
            overdue = [
                group
                for group in others
                if longest.get(group, 0.0) > ENGINE_PATIENCE_S * (ATTENDED_FACTOR if group in attended else 1)
            ]
            first = [*sorted(overdue, key=lambda group: -longest[group])[:1], self._warm]
        ordered = [*first, *(group for group in others if group not in first)]
        return {group: place for place, group in enumerate(ordered)}

    def _turn(self, name: str, backlog: set[str], least: int) -> float:
        run, now = run_of(name), self._now.get(self.group_of(name), 0.0)
        last = self._last_turn.get(run, -1.0)
        if run in backlog:
            turn = last + 1.0
        else:
            turn = max(now + min(LEAD, max(0, self._served[run] - least)), last + 1.0 if last >= now else 0.0)
            backlog.add(run)
        self._last_turn[run] = turn
        return turn

    def _gone(self, name: str) -> None:
        self._come_to(name)
        if _is_submission(name):
            self._served[run_of(name)] += 1
        del self._seen[name]

    def _come_to(self, name: str) -> None:
        if name in self._seen and _is_submission(name):
            group = self.group_of(name)
            self._now[group] = max(self._now.get(group, 0.0), self._seen[name].turn)


def _is_submission(name: str) -> bool:
    return name.startswith("f-")


def _kind(name: str, ending: Collection[str]) -> int:
    """Whose claim an entry is.

    Args:
        ending: runs that wait for their closing.
    """
    if is_waited_for(name):
        return CLAIM_OF_SUBMISSION
    if name.startswith("c-") or (name.startswith("p-") and run_of(name) in ending):
        return CLAIM_OF_CLOSING
    return CLAIM_OF_BACKGROUND


def _draw(salt: str, group: str) -> str:
    return hashlib.sha256(f"{salt} {group}".encode()).hexdigest()
