"""The supervisor's hand on the ledger: every entry is written only while this attempt is the newest one.

Slurm may run two attempts of one job at once, and a node that was thought dead may come back. The newest
`attempt_started` entry wins: an older attempt meets it at its next entry or look, and steps back.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

from autorl_hpc.files.layout import RunDir
from autorl_hpc.files.ledger import Ledger, Linked
from autorl_hpc.files.view import RunView
from autorl_hpc.records.base import Strict
from autorl_hpc.records.ledger import AttemptStarted
from autorl_hpc.states import EntryKind


class Superseded(Exception):
    """A newer attempt of the same run has begun: this one must end without a word."""


def _attempt_is_taken(number: int, entries: Sequence[Linked]) -> bool:
    return RunView.of(entries).attempt >= number


def _is_superseded(attempt: int, kind: EntryKind, seen: RunView, taken: int, entries: Sequence[Linked]) -> bool:
    """Whether a newer attempt has begun, or a submission or an agent's start comes after the seal. `seen` is the view of
    the first `taken`."""
    view = seen if len(entries) == taken else RunView.of(entries)
    return view.attempt > attempt or (kind in (EntryKind.SUBMISSION, EntryKind.SANDBOX) and view.sealed is not None)


class Chain:
    """The ledger of one run for one attempt. Thread-safe."""

    def __init__(self, run: RunDir) -> None:
        self.ledger = Ledger(run)
        self.view = RunView()
        self.attempt = 0
        self._taken = 0
        self._lock = threading.RLock()

    def look(self) -> RunView:
        """The run's view, new entries included. It doesn't change any more: other threads may go through it.

        Raises:
            Superseded: a newer attempt has begun.
        """
        with self._lock:
            self._absorb()
            if self.attempt and self.view.attempt > self.attempt:
                raise Superseded
            return self.view

    def begin(self, elapsed_s: float, workspace: str) -> int:
        """Starts an attempt and returns its number."""
        with self._lock:
            while True:
                number = self.look().attempt + 1
                body = AttemptStarted(attempt=number, elapsed_s=elapsed_s, workspace=workspace)
                taken = functools.partial(_attempt_is_taken, number)
                written = self.ledger.append(EntryKind.ATTEMPT_STARTED, body, role="supervisor", unless=taken)
                if written is not None:
                    self.attempt = number
                    self._absorb()
                    return number

    def write(self, kind: EntryKind, body: Strict) -> None:
        """Commits an entry of this attempt.

        Raises:
            Superseded: a newer attempt has begun, or the run is sealed and this is a submission.
        """
        with self._lock:
            # Against the whole chain: another thread's look may have met the newer attempt before this one.
            superseded = functools.partial(_is_superseded, self.attempt, kind, self.view, self._taken)
            written = self.ledger.append(kind, body, role="supervisor", unless=superseded)
            if written is None:
                raise Superseded
            self._absorb()

    def _absorb(self) -> None:
        entries = self.ledger.read()
        if len(entries) > self._taken:
            view = self.view.copy()
            for linked in entries[self._taken :]:
                view.take(linked)
            self.view, self._taken = view, len(entries)
