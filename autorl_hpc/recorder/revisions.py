"""Every state of an agent's code, as commits of code.git.

A look each second. What has changed is committed when a look 0.4 s later finds the same, or at the latest after 0.8 s: so a
change is settled within 2 s. A submission has its state committed at once.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass

from autorl_hpc.files.gitobjects import Files, GitDamage, Repository
from autorl_hpc.recorder.codefiles import CodeFiles
from autorl_hpc.recorder.codewalk import FOLDER_FLAGS, Listings, Tally, Walk
from autorl_hpc.recorder.job import Job
from autorl_hpc.recorder.pace import Allowance, Leavings, Pace
from autorl_hpc.recorder.watch import Lines, Moment
from autorl_hpc.records.recorded import CodeRevision

LOOK_S = 1.0
SETTLE_S = 0.4
RESTING_LOOK_S = 1.5
RESTS_S = 60.0
"""Without a change for so long, looks come less often: one, and one after SETTLE_S, still are less than 2 s."""

OVERDUE_S = 1.5
"""Since the last look that saw no change: what it may have missed for so long is committed by the next look in any case, the second
or the third that sees it."""

SHARE = 0.005
"""Of a core, as long as the other watches leave as much of WHOLE_SHARE; LEAST_SHARE in any case."""

WHOLE_SHARE, LEAST_SHARE, WINDOW_S = 0.0085, 0.003, 30.0

BURST_S = 0.4
AT_START = 0.125
"""Of that: so the first minute stays under 0.01 too."""

SLOWEST_S = 30.0
MOST_DEBT_S = 10.0
"""CPU time spent beyond the share at which submissions' questions are no longer answered: a flood of manifests must not buy looks."""

COMMITS_AT_ONCE = 300
COMMIT_EVERY_S = 20.0
"""Beyond them, one a COMMIT_EVERY_S: a program that writes files all day must not fill a shared disk with objects."""

MAX_REPOSITORY_BYTES = 512 << 20
RESERVED_BYTES = 64 << 20
"""Of these, for submissions alone."""

MAX_MISSED = 20
"""Kept from looks that led to no commit, until the next."""

PREFIX = "attempt-"


@dataclass(frozen=True)
class Ask:
    """A submission asks for the state right now. `answer` is called once, with the commit or None."""

    submission_id: int
    answer: Callable[[str | None], None]


class RepositoryFull(Exception):
    """code.git has reached its bound: the code of the run is no longer kept."""


class Revisions:
    """The watch. Each attempt has a ref of its own, which goes on from the one before: two at once can't disturb each other."""

    name = "revisions"

    def __init__(self, job: Job, asks: queue.SimpleQueue[Ask]) -> None:
        self.every_s = LOOK_S
        self.head: str | None = None
        self._job, self._asks = job, asks
        self._lines = Lines(job.run.recorded(self.name))
        self._repository = Repository.create(job.run.code_git)
        self._files = CodeFiles()
        self._listings = Listings()
        self._pace = Pace(SHARE, BURST_S, LOOK_S, SLOWEST_S, at_start=AT_START)
        self._leavings = Leavings(WHOLE_SHARE, LEAST_SHARE, SHARE, WINDOW_S)
        self._allowance = Allowance(COMMITS_AT_ONCE, COMMIT_EVERY_S)
        self._committed: Files | None = None
        self._seen: Files | None = None
        self._since: float | None = None
        self._unchanged_s = self._changed_s = time.monotonic()
        self._owed: list[CodeRevision] = []
        self._reasons: list[str] = []
        self._missed: set[str] = set()
        self._said: set[str] = set()
        self._full = self._dear = False
        self._go_on()

    def look(self, now: Moment) -> None:
        """Looks once. Raises what the file system raises; the next look begins anew."""
        asks, revision = self._asked(), None
        try:
            if not asks or self._pace.credit_s > -MOST_DEBT_S:
                self._look(now, asks[-1].submission_id if asks else None, exact=bool(asks))
                revision = self.head if self._files.files == self._committed else None
        finally:
            for ask in asks:
                ask.answer(revision)

    def close(self, now: Moment) -> None:
        """The agent has ended."""
        try:
            self._look(now, None, exact=True, last=True)
            if self._files.files != self._committed:
                self.head = None  # of the last state, nothing is kept
        finally:
            self._lines.close()

    def _asked(self) -> list[Ask]:
        asks = []
        while True:
            try:
                asks.append(self._asks.get_nowait())
            except queue.Empty:
                return asks

    def _go_on(self) -> None:
        """Goes on from this attempt's last commit, or from the attempt's before."""
        own, before = f"{PREFIX}{self._job.attempt}", self._repository.head_name()
        revision = self._repository.ref(own) or (None if before is None else self._repository.ref(before))
        try:
            self._committed = None if revision is None else self._repository.files(revision)
            self.head = revision
        except GitDamage as error:
            self._reasons.append(f"what was kept before can't be read: {error}")

    def _look(self, now: Moment, submission_id: int | None, *, exact: bool, last: bool = False) -> None:
        self._pace.share = self._leavings.share()
        self._pace.begin()
        try:
            tally = self._gather(exact)
            self._tell_owed()
            if self._due(exact) or (last and not self._missed <= self._said):
                self._commit(now, tally, submission_id, exact)
        finally:
            rests = time.monotonic() - self._changed_s >= RESTS_S
            self._pace.least_s = RESTING_LOOK_S if rests else LOOK_S
            pause_s = self._pace.end()
            self._dear = pause_s > self._pace.least_s
            self.every_s = SETTLE_S if self._since is not None and pause_s <= RESTING_LOOK_S else pause_s

    def _gather(self, exact: bool) -> Tally:
        root = os.open(self._job.workspace, FOLDER_FLAGS)
        try:
            turns = None if exact else self._files.turns
            walk = Walk(root, self._job.laid, self._files.kept, self._listings, turns)
            self._files.begin(exact=exact, dear=self._dear)
            for met in walk.run():
                self._files.add(met, walk.tally)
            self._files.end()
        finally:
            os.close(root)
        for missed in sorted(walk.tally.missed):
            if len(self._missed) < MAX_MISSED:
                self._missed.add(missed)
        return walk.tally

    def _due(self, exact: bool) -> bool:
        """Whether the state that was just seen is to be committed now."""
        files, at_s = self._files.files, time.monotonic()
        if files == self._committed:
            self._seen = self._since = None
            self._unchanged_s = at_s
            self._files.fresh.clear()
            return False
        if exact or self._committed is None:
            return True
        settled = files == self._seen or (self._since is not None and at_s - self._unchanged_s >= OVERDUE_S)
        self._seen, self._since = files, at_s if self._since is None else self._since
        self._changed_s = at_s
        return settled and self._allowance.left()

    def _commit(self, now: Moment, tally: Tally, submission_id: int | None, exact: bool) -> None:
        most = MAX_REPOSITORY_BYTES - (0 if exact else RESERVED_BYTES)
        if self._repository.size_bytes + sum(map(len, self._files.fresh.values())) > most:
            if exact or self._full:
                return
            self._full = True
            raise RepositoryFull(f"code.git has {most >> 20} MiB: from now on only states of submissions are kept")
        files, own, parent = self._files.files, f"{PREFIX}{self._job.attempt}", self.head
        for data in self._files.fresh.values():
            self._repository.write("blob", data)
        tree = self._repository.write_files(files)
        asked = "" if submission_id is None else f", submission {submission_id}"
        message = f"{now.elapsed_s:.1f} s, attempt {now.attempt}{asked}"
        revision = self._repository.commit(tree, parent, message, int(time.time()))
        self._repository.set_ref(own, revision)
        if self._is_newest():
            self._repository.set_head(own)
        before, self._committed, self.head = self._committed or {}, files, revision
        self._seen = self._since = None
        self._unchanged_s = self._changed_s = time.monotonic()
        self._files.fresh.clear()
        self._allowance.take()
        self._owed.append(
            CodeRevision.model_validate(
                {
                    **now.told(),
                    "revision": revision,
                    "parent": parent,
                    "submission_id": submission_id,
                    "files": len(files),
                    "changed": _changed(before, files),
                    "by_hash": self._files.by_hash,
                    "left_out": tally.files,
                    "by_name": tally.by_name,
                    "reason": self._reason(tally),
                }
            )
        )
        self._reasons.clear()
        self._said, self._missed = self._missed, set()
        self._tell_owed()

    def _is_newest(self) -> bool:
        """Whether no later attempt has begun to write."""
        name = self._repository.head_name() or ""
        number = name.removeprefix(PREFIX)
        return not (number.isascii() and number.isdigit()) or int(number) < self._job.attempt

    def _reason(self, tally: Tally) -> str | None:
        """What is not exact about the state that is being committed."""
        said = [*self._reasons, *(f"{count} {what}" for what, count in sorted(tally.reasons.items()))]
        if tally.more:
            said.append("more was left out than could be counted")
        if self.every_s > 2 * LOOK_S:
            said.append(f"looked at every {self.every_s:.0f} s: more often costs too much")
        if not self._allowance.left():
            said.append(f"changes without end: one commit in {COMMIT_EVERY_S:.0f} s")
        said += sorted(self._missed)
        return "; ".join(said)[:1000] or None

    def _tell_owed(self) -> None:
        """Writes the lines of commits; those that could not be written come with the next look."""
        while self._owed:
            self._lines.add(self._owed[0])
            self._owed.pop(0)


def _changed(before: Files, after: Files) -> int:
    return sum(before.get(path) != after.get(path) for path in before.keys() | after.keys())
