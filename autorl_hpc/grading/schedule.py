"""Which entry of the queue a grader takes next. No leader: each grader orders what it lists by the same rules.

Agents wait for feedback while their budget runs; ended runs wait for their closing, for the sake of people and disks. Neither may
starve the other. An engine is dear to change and cheap to keep: so a grader stays with what its engine can do, for a while.
All waits are measured by this process's own clock from when it first listed an entry.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.files.frozen_records import read_run
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.queue import (
    MAX_CHARS,
    drop_trouble,
    is_waited_for,
    number_of,
    read_trouble,
    run_of,
    write_trouble,
)
from autorl_hpc.grading.evaluate import engine_group
from autorl_hpc.records.exchange import Trouble
from autorl_hpc.records.run import RunRecord
from autorl_hpc.states import Fault

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


# When an entry that failed is tried again: less and less often, whichever grader tries it.
#
# How often it failed stands on disk; the wait is measured by each grader's own clock from when it first saw the entry, or failed at
# it. Nothing is decided by another host's clock.

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


# What a grader knows of the runs: their frozen records, read once, and their ledgers, of which only new entries are read.


class RunCatalog:
    """The runs of an experiment, as one grader knows them.

    Args:
        runs: their ids; a later launch may add some.
    """

    def __init__(self, experiment: ExperimentDir, runs: Callable[[], Sequence[str]]) -> None:
        self.experiment = experiment
        self.runs = runs
        self._records: dict[str, RunRecord] = {}
        self._ledgers: dict[str, Ledger] = {}
        self._cells: dict[str, str] = {}
        self._groups_of_cells: tuple[Sequence[str], dict[str, str]] = ((), {})

    def record(self, run_id: str) -> RunRecord:
        """run.json."""
        if run_id not in self._records:
            self._records[run_id] = read_run(self.experiment.run(run_id))
        return self._records[run_id]

    def ledger(self, run_id: str) -> Ledger:
        """The run's ledger."""
        return self._ledgers.setdefault(run_id, Ledger(self.experiment.run(run_id)))

    def forget_ledger(self, run_id: str) -> None:
        """Of a run that is closed."""
        self._ledgers.pop(run_id, None)

    def served(self, run_id: str) -> int:
        """How many of its submissions have outcomes: a file each."""
        return len({name.split(".", 1)[0] for name in reading.list_names(self.experiment.run(run_id).items)})

    def cell(self, name: str) -> str:
        """Task, base model and recipe of an entry, as baselines are named by them."""
        if name.startswith("b"):
            return name.split("-", 1)[1]
        try:
            return self._cell(run_of(name))
        except (AutorlError, OSError):
            return name

    def group(self, name: str) -> str | None:
        """The engine that an entry needs; None where that can't be told."""
        try:
            if not name.startswith("b"):
                return self._group(run_of(name))
            runs = self.runs()
            if runs != self._groups_of_cells[0]:
                self._groups_of_cells = (runs, {self._cell(run): self._group(run) for run in runs})
            return self._groups_of_cells[1].get(self.cell(name))
        except (AutorlError, OSError):
            return None

    def _cell(self, run_id: str) -> str:
        if run_id not in self._cells:
            science = self.record(run_id).science
            model = science.base_model.replace("/", "+")
            self._cells[run_id] = f"{science.task}-{model}-{science.recipe.hash()[:8]}"
        return self._cells[run_id]

    def _group(self, run_id: str) -> str:
        science = self.record(run_id).science
        return engine_group(science.base_model, science.recipe)
