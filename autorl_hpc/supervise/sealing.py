"""The end of a run's part: what it used of its budget, its seal, and what is queued for the graders then."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from autorl_hpc.files import artifacts, reading
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.ledger import Linked
from autorl_hpc.files.queue import put
from autorl_hpc.files.view import RunView
from autorl_hpc.records.driver import NO_DRIVER
from autorl_hpc.records.exchange import QueueEntry
from autorl_hpc.records.ledger import DriverUse, Sealed
from autorl_hpc.records.run import RunRecord
from autorl_hpc.states import EndedBy, EntryKind, Fault, QueueKind
from autorl_hpc.supervise.budget import Used, read_clock
from autorl_hpc.supervise.chain import Chain, Superseded
from autorl_hpc.supervise.limits import HOUR_S
from autorl_hpc.supervise.processes import end_all
from autorl_hpc.supervise.spending import read_use

log = logging.getLogger("autorl_hpc.supervisor")


class Seals:
    """Seals one run."""

    def __init__(self, experiment: ExperimentDir, record: RunRecord, chain: Chain) -> None:
        self.experiment = experiment
        self.run = experiment.run(record.run_id)
        self.record = record
        self.chain = chain
        self.marks = hashlib.sha256(str(self.run.path.resolve()).encode()).hexdigest()[:32] + "-"

    def used_so_far(self, view: RunView) -> Used:
        """What all earlier attempts used, from whoever knew last."""
        clock = read_clock(self.run.clock)
        elapsed_s = max([0.0, *(a.elapsed_s for a in view.attempts), *(e.elapsed_s for e in view.ended)])
        if clock is not None:
            elapsed_s = max(elapsed_s, clock.elapsed_s)
        for number in range(1, view.attempt + 1):
            left = reading.read_json_or_none(self.elapsed_file(number))
            if isinstance(left, dict) and isinstance(left.get("elapsed_s"), (int, float)):
                elapsed_s = max(elapsed_s, float(left["elapsed_s"]))
        if clock is None:
            return Used(elapsed_s)
        unseen_s = elapsed_s - clock.elapsed_s  # of the attempt that wrote it: a later one would have written it anew
        gpu_s = clock.gpu_s + clock.gpus * unseen_s
        return Used(elapsed_s, clock.given_back_s, clock.suspended_s, gpu_s, clock.progress)

    def driver_use(self) -> DriverUse | None:
        """What the agent had of its driver; None: it has none."""
        return None if self.record.science.driver == NO_DRIVER else read_use(self.run.driver_log)

    def had_begun(self, attempt: int) -> bool:
        """Whether the agent ran in an attempt before this one: its keeper then left, or at least opened, a file."""
        names = set(reading.list_names(self.run.path))
        return any(self.elapsed_file(number).name in names for number in range(1, attempt))

    def elapsed_file(self, attempt: int) -> Path:
        return self.run.path / f"elapsed-{attempt}.json"

    def write(self, body: Sealed) -> None:
        """Commits the seal unless one stands, or a newer attempt has begun.

        Raises:
            Superseded: so it is.
        """

        def taken(entries: Sequence[Linked]) -> bool:
            view = RunView.of(entries)
            return view.sealed is not None or view.attempt > self.chain.attempt

        written = self.chain.ledger.append(EntryKind.SEALED, body, role="supervisor", unless=taken)
        if written is None and RunView.of(self.chain.ledger.entries).sealed != body:  # equal: an earlier try wrote it
            raise Superseded
        self.chain.look()

    def without_agent(self, ended_by: EndedBy, fault: Fault | None, reason: str) -> int:
        end_all(os.getpid(), self.marks)
        view = self.chain.look()
        used = self.used_so_far(view)
        self.chain.attempt = view.attempt
        body = Sealed(
            submissions=tuple(s.submission_id for s in view.accepted()),
            ended_by=ended_by,
            exit_code=None,
            elapsed_s=used.elapsed_s,
            given_back_s=used.given_back_s,
            gpu_hours=used.gpu_s / HOUR_S,
            driver=self.driver_use(),
            exit_codes=used.progress.exit_codes,
            reprompts=used.progress.reprompts,
            refused=len(view.refused()),
            fault=fault,
            reason=reason,
        )
        try:
            self.write(body)
        except Superseded:
            log.warning("another supervisor of this run is at work: leaving it alone")
            return 0
        artifacts.remove_unfinished(self.experiment.artifacts, self.record.run_id, self.chain.attempt)
        self.queue_closing()
        return 0

    def queue_closing(self) -> None:
        """Queues what a sealed run still needs: its scores, should a kill have come between ledger and queue; its end."""
        view = self.chain.look()
        if view.closed is not None:
            return
        for submission in view.unscored():
            put(self.experiment.queue, self._queue_entry(QueueKind.FEEDBACK, submission.submission_id))
        put(self.experiment.queue, self._queue_entry(QueueKind.CLOSE))

    def _queue_entry(self, kind: QueueKind, submission_id: int | None = None) -> QueueEntry:
        return QueueEntry(
            kind=kind,
            run_id=self.run.run_id,
            submission_id=submission_id,
            task=self.record.science.task,
            base_model=self.record.science.base_model,
            recipe_hash=self.record.recipe_hash,
        )
