"""Scheduling of a grader: order of queue entries, retry with backoff, catalog of runs. Each grader sorts its listing by the
same rules (docs/file-protocol.md), and measures waits by its own clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

from autorl_hpc.errors import AutorlError
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
"""Closings come first while no submission has waited longer. Half of the minute after which waiting is credited to an
agent's budget, so that work in progress can end before that."""
CLOSING_EVERY: Final = 4
"""While submissions wait longer, every fourth turn goes to a closing. A busy grader then usually closes runs as fast as they
end, and submissions wait a third longer."""
BACKGROUND_EVERY: Final = 16  # Every 16th turn goes to a baseline on the report split, for which nobody waits yet
ENGINE_PATIENCE_S: Final = 120.0
"""A grader changes its engine only after an entry for another one has waited this long. An engine takes up to a minute to
start, so at most a third of the time goes into changes."""
ATTENDED_FACTOR: Final = 3
"""Patience is longer by this factor if another grader works on such entries. Not unlimited, because it may have died."""


class _Seen(NamedTuple):
    """A listed entry; `turn` is that of a submission, lower is sooner."""

    since_s: float
    serial: int
    turn: int


@dataclass
class Order:
    """The order of one grader's entries. Thread-safe, because the heartbeat thread lists the queue too. `group_of` returns an
    entry's engine group or None; `salt` lets graders begin with different groups."""

    group_of: Callable[[str], str | None] = lambda name: None
    salt: str = ""
    clock: Callable[[], float] = time.monotonic
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _last_turn: dict[str, int] = field(default_factory=dict)  # by run: turn of its newest submission
    _now: dict[str | None, int] = field(default_factory=dict)  # by group: the current turn
    _serial: int = 0
    _without_closing: int = 0
    _without_background: int = 0
    _warm: str | None = None
    _warm_since_s: float = 0.0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def look(self, names: Collection[str]) -> None:
        """Note new entries, and entries that are gone because a grader has done them."""
        with self._lock:
            for name in self._seen.keys() - set(names):
                self._come_to(name)
                del self._seen[name]
            new = [name for name in names if name not in self._seen]
            for name in sorted(new, key=lambda name: (number_of(name), name)):
                self._serial += 1
                run, turn = run_of(name), 0
                if name.startswith("f-"):
                    turn = max(self._now.get(self.group_of(name), 0), self._last_turn.get(run, -1) + 1)
                    self._last_turn[run] = turn
                self._seen[name] = _Seen(self.clock(), self._serial, turn)

    def waited_s(self, name: str) -> float | None:
        """Return the seconds since this grader first listed the entry; None if it is not listed."""
        with self._lock:
            seen = self._seen.get(name)
            return None if seen is None else self.clock() - seen.since_s

    def began(self, name: str) -> None:
        """Note that this grader gave an entry a turn. Fingerprints take none: they are computed beside the others."""
        if name.startswith("p-"):
            return
        with self._lock:
            self._without_closing = 0 if name.startswith("c-") else self._without_closing + 1
            self._without_background = 0 if name.startswith("b2-") else self._without_background + 1
            self._come_to(name)

    def sort(
        self, names: Collection[str], claimed: Collection[str] = (), warm: str | None = None, own: Collection[str] = ()
    ) -> list[str]:
        """Return the names in the order to try them, without closings that can't be ready yet. Graders work on those `claimed`, this
        one in the background on its `own`; `warm` is the running engine's group."""
        with self._lock:
            self.look(names)
            if warm != self._warm:
                self._warm, self._warm_since_s = warm, self.clock()
            free = [name for name in names if name not in claimed]
            ending = {run_of(name) for name in names if name.startswith("c-")}
            due = {run_of(name) for name in names if name.startswith(("f-", "p-"))}
            groups = {name: self.group_of(name) for name in names if not name.startswith("p-")}
            ranks = self._group_ranks(free, groups, {groups.get(n) for n in claimed if n not in own})
            kinds = self._kind_ranks(free)

            def rank(name: str) -> tuple[int, int, int, int, int]:
                seen, kind = self._seen[name], name[:2]
                if kind == "p-":
                    return -1, 0, 0, int(run_of(name) not in ending), seen.serial
                late, place = kinds.get(kind, kinds["b2"])
                return late, ranks.get(groups[name], 0), place, -1 if kind == "b1" else seen.turn, seen.serial

            return sorted((n for n in names if not (n.startswith("c-") and run_of(n) in due)), key=rank)

    def _kind_ranks(self, free: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Return by kind of entry: whether it comes after all engine groups, and its rank within a group."""
        now = self.clock()
        pressed = any(is_waited_for(name) and now - self._seen[name].since_s > CLOSINGS_FIRST_S for name in free)
        closings_first = not pressed or self._without_closing >= CLOSING_EVERY - 1
        background_first = self._without_background >= BACKGROUND_EVERY - 1
        return {
            "c-": (0, 1 if closings_first else 3),
            "f-": (0, 2),
            "b1": (0, 2),
            "b2": (0, 0) if background_first else (1, 4),
        }

    def _group_ranks(
        self, free: Iterable[str], groups: Mapping[str, str | None], attended: Collection[str | None]
    ) -> dict[str | None, int]:
        """Rank the engine groups: the running engine first, unless entries for another have waited too long."""
        longest: dict[str, float] = {}
        for name in free:
            group = groups.get(name)
            if group is not None and not name.startswith("b2-"):
                longest[group] = max(longest.get(group, 0.0), self.clock() - self._seen[name].since_s)
        others = sorted(
            {group for group in groups.values() if group is not None and group != self._warm},
            key=lambda group: (
                group in attended,
                -round(longest.get(group, -1.0)),
                sha256(f"{self.salt} {group}".encode()).digest(),
            ),
        )
        first: list[str | None] = [self._warm]
        if self.clock() - self._warm_since_s > ENGINE_PATIENCE_S:
            patience = {g: ENGINE_PATIENCE_S * (ATTENDED_FACTOR if g in attended else 1) for g in others}
            overdue = [group for group in others if longest.get(group, 0.0) > patience[group]]
            first = [*sorted(overdue, key=lambda group: -longest[group])[:1], self._warm]
        ordered = [*first, *(group for group in others if group not in first)]
        return {None: 0, **{group: place for place, group in enumerate(ordered) if group is not None}}

    def _come_to(self, name: str) -> None:
        if name in self._seen and name.startswith("f-"):
            group = self.group_of(name)
            self._now[group] = max(self._now.get(group, 0), self._seen[name].turn)


# --- retry with backoff: failures are counted on disk, each grader measures the wait by its own clock

RETRY_AFTER_TROUBLE_S = 5.0
MAX_RETRY_S = 120.0
"""Maximum wait. Repeated failures are retried more and more rarely, so that one bad cell does not block the others."""
DEATHS_BEFORE_LAST = 2  # Graders that died on an entry before it waits behind all others. One may have been preempted.


def pause_s(failures: int) -> float:
    """Return the wait in seconds after this many failures."""
    return min(MAX_RETRY_S, RETRY_AFTER_TROUBLE_S * 2.0 ** min(failures - 1, 10)) if failures > 0 else 0.0


@dataclass
class Backoff:
    """Retry waits of one grader's entries. It waits at most `most_s` for what failed before it, so that it tries before it leaves."""

    folder: Path
    grader: str
    clock: Callable[[], float] = time.monotonic
    most_s: float = MAX_RETRY_S
    _not_before: dict[str, float] = field(default_factory=dict)
    _failures: dict[str, int] = field(default_factory=dict)  # of each entry that was looked at

    def order(self, names: list[str], deaths: Mapping[str, int]) -> list[str]:
        """Move entries on which graders died repeatedly to the end; `deaths` counts graders that hold or died on each."""
        return sorted(names, key=lambda name: max(0, deaths.get(name, 0) - DEATHS_BEFORE_LAST + 1))

    def waits(self, name: str, deaths: int) -> bool:
        """Return whether the entry must not be tried yet."""
        if name not in self._failures:
            known = read_trouble(self.folder, name)
            self._failures[name] = known.failures if known else 0
            wait_s = min(self.most_s, pause_s(max(self._failures[name], deaths - DEATHS_BEFORE_LAST + 1)))
            if wait_s:
                self.later(name, wait_s)
        return self._not_before.get(name, 0.0) > self.clock()

    def later(self, name: str, wait_s: float) -> None:
        """Don't try the entry for this many seconds."""
        self._not_before[name] = self.clock() + wait_s

    def now(self, name: str) -> None:
        """Allow the entry at once, because its prerequisite is ready."""
        self._not_before.pop(name, None)

    def failed(self, name: str, problem: str, fault: Fault, least_s: float = 0.0) -> float:
        """Record a failure here and on disk; return the wait in seconds, at least `least_s`."""
        known = read_trouble(self.folder, name)  # another grader may have tried meanwhile
        failures = max(self._failures.get(name, 0), known.failures if known else 0) + 1
        self._failures[name] = failures
        wait_s = max(least_s, pause_s(failures))
        self.later(name, wait_s)
        problem = problem[:MAX_CHARS]
        note = Trouble(entry=name, failures=failures, fault=fault, problem=problem, grader=self.grader)
        write_trouble(self.folder, note)
        return wait_s

    def well(self, name: str) -> None:
        """Note that the entry succeeded."""
        drop_trouble(self.folder, name)
        self._failures.pop(name, None)
        self._not_before.pop(name, None)


@dataclass
class RunCatalog:
    """Frozen records and ledgers of an experiment's runs; records are read once, ledgers incrementally. `runs` returns the run ids;
    a later launch may add some."""

    experiment: ExperimentDir
    runs: Callable[[], Sequence[str]]
    _records: dict[str, RunRecord] = field(default_factory=dict)
    _ledgers: dict[str, Ledger] = field(default_factory=dict)
    _cells: dict[str, str] = field(default_factory=dict)

    def record(self, run_id: str) -> RunRecord:
        """Return the record in run.json."""
        if run_id not in self._records:
            self._records[run_id] = read_run(self.experiment.run(run_id))
        return self._records[run_id]

    def ledger(self, run_id: str) -> Ledger:
        """Return the run's ledger."""
        return self._ledgers.setdefault(run_id, Ledger(self.experiment.run(run_id)))

    def forget_ledger(self, run_id: str) -> None:
        """Drop the cached ledger of a closed run."""
        self._ledgers.pop(run_id, None)

    def cell(self, name: str) -> str:
        """Return the cell of an entry (task, base model and recipe), in the form used in names of baselines."""
        if name.startswith("b"):
            return name.split("-", 1)[1]
        try:
            return self._cell(run_of(name))
        except (AutorlError, OSError):
            return name

    def group(self, name: str) -> str | None:
        """Return the engine group that an entry needs; None if unknown."""
        try:
            if not name.startswith("b"):
                return self._group(run_of(name))
            cell = self.cell(name)
            return next((self._group(run) for run in self.runs() if self._cell(run) == cell), None)
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
