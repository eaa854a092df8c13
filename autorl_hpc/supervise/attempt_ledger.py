"""Write the ledger as one attempt: `LedgerWriter` (entries), `Stops` (signals, cancel, a newer attempt), `Seals` (the run's end).
Slurm may run two attempts at once. The newest `attempt_started` entry wins: an older attempt notices it and stops."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from autorl_hpc.files import artifacts, reading
from autorl_hpc.files.frozen_records import recorded_hashes
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.ledger import Ledger, Linked
from autorl_hpc.files.processes import end_all
from autorl_hpc.files.queue import put
from autorl_hpc.files.run_view import RunView
from autorl_hpc.records.base import Strict
from autorl_hpc.records.driver import NO_DRIVER
from autorl_hpc.records.entries import AttemptStarted, DriverUse, Sealed
from autorl_hpc.records.exchange import QueueEntry
from autorl_hpc.records.run import RunRecord
from autorl_hpc.states import EndedBy, EntryKind, Fault, QueueKind
from autorl_hpc.supervise.budget import HOUR_S, BudgetUsed, read_use, used_so_far

log = logging.getLogger("autorl_hpc.supervisor")

T = TypeVar("T")


class Superseded(Exception):
    """A newer attempt of the same run has begun, so this one must stop without writing anything."""


def _is_superseded(attempt: int, kind: EntryKind, entries: Sequence[Linked]) -> bool:
    """Return whether a newer attempt has begun, or a submission or an agent's start would follow the seal."""
    view = RunView.of(entries)
    return view.attempt > attempt or (kind in (EntryKind.SUBMISSION, EntryKind.SANDBOX) and view.sealed is not None)


class LedgerWriter:
    """Writes one run's ledger for one attempt. Thread-safe."""

    def __init__(self, run: RunDir) -> None:
        self.ledger = Ledger(run)
        self.view = RunView()
        self.attempt = 0
        self._taken = 0
        self._lock = threading.RLock()

    def look(self) -> RunView:
        """Read new entries and return the run's view, which is never changed later. Raises Superseded: a newer attempt began."""
        with self._lock:
            entries = self.ledger.read()
            if len(entries) > self._taken:
                self.view, self._taken = RunView.of(entries), len(entries)
            if self.attempt and self.view.attempt > self.attempt:
                raise Superseded
            return self.view

    def begin(self, elapsed_s: float, workspace: str, gpus: int | None = None, gpu_model: str | None = None) -> int:
        """Start an attempt and return its number."""

        def taken(entries: Sequence[Linked]) -> bool:
            return RunView.of(entries).attempt >= body.attempt

        with self._lock:
            while True:
                number = self.look().attempt + 1
                where = {"workspace": workspace, "gpus": gpus, "gpu_model": gpu_model}
                body = AttemptStarted(attempt=number, elapsed_s=elapsed_s, **where)
                if self.ledger.append(EntryKind.ATTEMPT_STARTED, body, role="supervisor", unless=taken) is not None:
                    self.attempt = number
                    self.look()
                    return number

    def write(self, kind: EntryKind, body: Strict) -> None:
        """Commit an entry of this attempt. Raises Superseded: see `_is_superseded`."""
        with self._lock:
            # Checks the whole ledger, because another thread may have read the newer attempt's entry before this one.
            superseded = functools.partial(_is_superseded, self.attempt, kind)
            if self.ledger.append(kind, body, role="supervisor", unless=superseded) is None:
                raise Superseded
            self.look()


# --- what stops an attempt: a signal to this job, a newer attempt, the user's `cancel`

LOOP_S = 0.1
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
SIGNAL_LAG_S = 5.0  # a scheduler signals all processes at once: a killed agent may be seen before our own signal
END_PATIENCE_S, END_RETRY_S = 600.0, 2.0  # of `Stops.patiently`: an agent's work can't be repeated


class Stops:
    """Tells whether one attempt has to stop, and why."""

    def __init__(self, experiment: ExperimentDir, run_id: str) -> None:
        self.experiment = experiment
        self.run_id = run_id
        self.signal: int | None = None
        self.superseded = threading.Event()

    def listen(self) -> None:
        """Handle the scheduler's signals from now on."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            self.signal = number

        for number in SIGNALS:
            signal.signal(number, on_signal)

    @property
    def asked(self) -> bool:
        """Return whether a signal or a newer attempt asks this one to stop."""
        return self.signal is not None or self.superseded.is_set()

    def cancelled(self) -> bool:
        """Return whether the user cancelled the run."""
        return bool({"all", self.run_id} & set(reading.list_names(self.experiment.cancel)))

    def ended_agent(self, exit_code: int | None) -> bool:
        """Return whether an agent was killed by the signal that stops the whole job. Waits SIGNAL_LAG_S for our own signal."""
        by_signal = exit_code is not None and (exit_code < 0 or 128 < exit_code <= 128 + signal.NSIG)
        deadline = time.monotonic() + SIGNAL_LAG_S
        while by_signal and self.signal is None and time.monotonic() < deadline:
            time.sleep(LOOP_S)
        return by_signal and self.signal is not None

    def patiently(self, write: Callable[[], T], may_pass: Callable[[OSError], bool] = lambda error: True) -> T:
        """Retry `write` while the file system fails, until a signal or END_PATIENCE_S. The budget's clock is not running.
        Raises OSError: `may_pass` rejects the error, or the time is over."""
        deadline = time.monotonic() + END_PATIENCE_S
        while True:
            try:
                return write()
            except OSError as error:
                if self.signal is not None or time.monotonic() > deadline or not may_pass(error):
                    raise
                log.warning("the file system fails; trying again: %s", error)
                time.sleep(END_RETRY_S)


# --- the seal: what the run used of its budget, and what is queued for the graders afterwards


class Seals:
    """Seals one run."""

    def __init__(self, experiment: ExperimentDir, record: RunRecord, chain: LedgerWriter) -> None:
        self.experiment = experiment
        self.run = experiment.run(record.run_id)
        self.record = record
        self.chain = chain
        self.marks = hashlib.sha256(str(self.run.path.resolve()).encode()).hexdigest()[:32] + "-"

    def used_so_far(self, view: RunView) -> BudgetUsed:
        """Return what all earlier attempts used, by the latest of ledger, clock file and keepers' files."""
        told = max([0.0, *(a.elapsed_s for a in view.attempts), *(e.elapsed_s for e in view.ended)])
        return used_so_far(self.run.clock, told, [self.elapsed_file(n) for n in range(1, view.attempt + 1)])

    def driver_use(self) -> DriverUse | None:
        """Return the agent's use of its driver; None if it has no driver."""
        return None if self.record.science.driver == NO_DRIVER else read_use(self.run.driver_log)

    def had_begun(self, attempt: int) -> bool:
        """Return whether the agent ran in an attempt before this one: its keeper creates a file at the start."""
        names = set(reading.list_names(self.run.path))
        return any(self.elapsed_file(number).name in names for number in range(1, attempt))

    def elapsed_file(self, attempt: int) -> Path:
        """Return the file in which a keeper notes how long the agent ran."""
        return self.run.path / f"elapsed-{attempt}.json"

    def seal(self, ended_by: EndedBy, used: BudgetUsed, **told: Any) -> None:
        """Commit the seal; it can be repeated. `told`: further fields of it. Raises Superseded: the run is sealed with another entry, or
        a newer attempt has begun."""
        view = self.chain.look()
        body = Sealed(
            submissions=tuple(s.submission_id for s in view.accepted()),
            ended_by=ended_by,
            elapsed_s=used.elapsed_s,
            given_back_s=used.given_back_s,
            gpu_hours=used.gpu_s / HOUR_S,
            exit_codes=used.progress.exit_codes,
            reprompts=used.progress.reprompts,
            refused=len(view.refused()),
            recorded=recorded_hashes(self.run),
            **{"exit_code": None, **told},
        )

        def taken(entries: Sequence[Linked]) -> bool:
            view = RunView.of(entries)
            return view.sealed is not None or view.attempt > self.chain.attempt

        written = self.chain.ledger.append(EntryKind.SEALED, body, role="supervisor", unless=taken)
        if written is None and RunView.of(self.chain.ledger.entries).sealed != body:  # equal: an earlier try wrote it
            raise Superseded
        self.chain.look()

    def without_agent(self, ended_by: EndedBy, fault: Fault | None, reason: str) -> int:
        """Seal a run whose agent is not running; its last processes are ended first. Return the exit code of the job."""
        end_all(os.getpid(), self.marks)
        view = self.chain.look()
        self.chain.attempt = view.attempt
        try:
            self.seal(ended_by, self.used_so_far(view), driver=self.driver_use(), fault=fault, reason=reason)
        except Superseded:
            log.warning("another supervisor of this run is at work: leaving it alone")
            return 0
        artifacts.remove_unfinished(self.experiment.artifacts, self.record.run_id, self.chain.attempt)
        self.queue_closing()
        return 0

    def queue_closing(self) -> None:
        """Queue what a sealed run still needs: submissions that a kill kept out of the queue, and its closing."""
        view = self.chain.look()
        if view.closed is not None:
            return
        for submission in view.unscored():
            put(self.experiment.queue, queue_entry(self.record, QueueKind.FEEDBACK, submission.submission_id))
        put(self.experiment.queue, queue_entry(self.record, QueueKind.CLOSE))


def queue_entry(record: RunRecord, kind: QueueKind, submission_id: int | None = None) -> QueueEntry:
    """Return what is queued for the graders."""
    what = {"task": record.science.task, "base_model": record.science.base_model, "recipe_hash": record.recipe_hash}
    return QueueEntry(kind=kind, run_id=record.run_id, submission_id=submission_id, **what)
