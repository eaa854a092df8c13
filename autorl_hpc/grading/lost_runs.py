"""The watcher: polls the scheduler for the experiment's jobs, in a thread of one grader at a time, and submits anew or seals runs whose
jobs are gone."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from autorl_hpc.cluster import slurm
from autorl_hpc.cluster.job_table import (
    LOG_TAIL_BYTES,
    JobTable,
    ListedJob,
    OrphanEnding,
    explain,
    names_of,
    read_seen,
    read_submitted,
    write_seen,
)
from autorl_hpc.cluster.slurm import SchedulerError
from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.files.frozen_records import read_experiment
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.processes import host_name
from autorl_hpc.files.queue import Claims, HeartbeatWatch
from autorl_hpc.files.run_view import RunView
from autorl_hpc.records.cluster import SeenJob, SeenJobs, SlurmJobs
from autorl_hpc.states import Fault, JobState, job_state

log = logging.getLogger("autorl_hpc.watcher")
ENTRY = "watcher"
STANDS_STILL_S = 60.0  # A clock that has not moved for this long has stopped; a supervisor writes its clock every 10 s
LOST_LOOKS = 2
FINISH_LOOKS, FINISH_PAUSE_S = 6, 3.0  # Looks of the last job after STANDS_STILL_S: enough, also for exit codes
FINISH_PATIENCE_S = 120.0  # Its wait for a silent scheduler, beyond the time until a dead watcher's claim is free
SEAL_LIMIT_S = 600.0
JUST_SUBMITTED_S = 60.0  # A job that sbatch has just accepted may be missing in squeue's answer


class Watcher(threading.Thread):
    """The watcher, in one grader at a time: polls the scheduler, writes seen.json for `status`, and seals runs whose jobs are
    gone: clock still for STANDS_STILL_S of the watcher's own time, no job in squeue all that while, and scontrol agrees."""

    def __init__(
        self,
        experiment: ExperimentDir,
        claims: Claims,
        period_s: float,
        *,
        standstill_s: float = STANDS_STILL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name="watcher", daemon=True)
        self.experiment = experiment
        self.claims = claims
        self.period_s = period_s
        self.standstill_s, self.clock = standstill_s, clock
        self._ending = threading.Event()
        self._seen: dict[tuple[str, str], SeenJob] = {}  # by name and job id, with what was learned about ended jobs
        self._asked: set[tuple[str, str]] = set()  # jobs whose exit code was requested
        self._lost: dict[tuple[str, str], int] = {}  # jobs missing in squeue: number of accounting requests
        self._still: dict[str, tuple[int, float]] = {}  # of runs without a job: their clock's counter, and since when
        self._sealed: set[str] = set()
        self._first_seen: dict[int, float] = {}
        self._accounting = True
        self._written: SeenJobs | None = None
        self._counter = 0
        self._trouble: str | None = None
        self._generation: int | None = None
        self._claiming = threading.Lock()

    def run(self) -> None:
        while not self._ending.wait(self.period_s):
            try:
                self.step()
            except SchedulerError as error:
                # log each problem once, or a site whose nodes have no squeue fills the log
                if error.what != self._trouble:
                    log.warning("the scheduler can't be asked: %s", error.what)
                self._trouble = error.what
                self._note(error.what)
            except Exception:  # watching must survive a defect, or orphaned runs would stay open
                log.exception("watching failed")

    def end(self) -> None:
        """Stop the watcher: it takes no more claims. Its claim is given back with the grader's other claims."""
        with self._claiming:
            self._ending.set()

    def step(self) -> bool:
        """Run one period with at most one question to the scheduler; return False if another watcher has the claim. SchedulerError if
        the scheduler doesn't answer."""
        jobs = read_submitted(self.experiment)
        if jobs is None or not self._hold_claim():
            return False
        looks = not self._ask_for_exit_code() and not self._ask_accounting()
        if looks:
            self._look(jobs)
        self._trouble = None
        self._note(None)
        if looks:  # never on what squeue said a while ago
            board = JobTable.of(jobs, self._seen.values())
            self._end_orphans(jobs, self._orphans(jobs, board), board)
        return True

    def _hold_claim(self) -> bool:
        with self._claiming:
            if self._ending.is_set():
                return False
            current = self.claims.current()
            if self._generation is not None and current.get(ENTRY) == self._generation:
                return True
            self._generation = self.claims.take(ENTRY, current)
        if self._generation is not None:
            for job in read_seen(self.experiment).jobs:  # notes of the previous watcher
                self._seen.setdefault((job.name, job.job_id), job)
        return self._generation is not None

    def _look(self, jobs: SlurmJobs) -> None:
        names = names_of(jobs)
        now = {(job.name, job.job_id): job for job in slurm.jobs(names)}
        if (own := slurm.own_id()) is not None and all(job_id != own for _, job_id in now):
            what = f"squeue's answer lacks job {own}, which asked: the answer is not believed"
            raise SchedulerError(what, fault=Fault.CLUSTER, next_step="nothing: it is asked again")
        for key, job in now.items():
            known = self._seen.get(key)
            if known is not None and known.state == job.state and known.exit_code is not None:
                continue  # squeue reports no exit code, so keep the known one
            self._seen[key] = job
            self._asked.discard(key)
        for key, job in list(self._seen.items()):
            if key not in now and not job_state(job.state).over:  # ended between two looks, or lost
                self._lost.setdefault(key, 0)
            else:
                self._lost.pop(key, None)

    def _ask_accounting(self) -> bool:
        """Ask accounting about jobs that left squeue before their end was seen; return False if there are none. A job that it does
        not know in two tries, or that can't be queried, counts as gone."""
        lost = {key: job for key, job in self._seen.items() if key in self._lost}
        if not lost:
            return False
        try:
            told = slurm.accounting({job.name for job in lost.values()}) if self._accounting else None
            self._accounting = told is not None
        except SchedulerError as error:
            log.warning("accounting can't be asked: %s", error.what)
            told = []
        for key, job in lost.items():
            known = [one for one in told or [] if one.job_id == job.job_id and job_state(one.state).over]
            self._lost[key] += 1
            if known:
                self._seen[key] = known[-1].model_copy(update={"number": known[-1].number or job.number})
            elif self._accounting and self._lost[key] < LOST_LOOKS:
                continue  # the database may be some seconds behind
            else:
                del self._seen[key]
            del self._lost[key]
        return True

    def _ask_for_exit_code(self) -> bool:
        """Ask once for exit codes of an agents' array with a task that ended badly; return False if none was needed."""
        for key, job in self._seen.items():
            ended_badly = job_state(job.state) is JobState.ENDED and job.exit_code is None
            if ended_badly and ".agents-" in job.name and key not in self._asked:
                told = slurm.with_exit_codes(list(self._seen.values()), job.job_id)
                base = job.job_id.partition("_")[0]
                self._seen = {(other.name, other.job_id): other for other in told}
                # If scontrol has lost them too, don't ask again.
                self._asked |= {k for k, other in self._seen.items() if other.job_id.partition("_")[0] == base}
                return True
        return False

    def all_sealed(self) -> bool:
        """Return whether every run is sealed."""
        try:
            runs = [self.experiment.run(run_id) for run_id in read_experiment(self.experiment).runs]
            return all(RunView.of(Ledger(run).read()).sealed is not None for run in runs)
        except (AutorlError, OSError):
            return False

    def _orphans(self, jobs: SlurmJobs, board: JobTable) -> list[str]:
        record = read_experiment(self.experiment)
        alive = board.alive_runs() | self._just_submitted(jobs)
        closed = set(reading.list_names(self.experiment.finished))
        found: list[str] = []
        for run_id in record.runs:
            if run_id in closed or run_id in self._sealed:
                continue
            if run_id in alive or not board.of_run(run_id):
                self._still.pop(run_id, None)
                continue
            run = self.experiment.run(run_id)
            if RunView.of(Ledger(run).read()).sealed is not None:
                self._sealed.add(run_id)
                continue
            clock = reading.read_json_or_none(run.clock)
            counter = clock.get("counter", -1) if isinstance(clock, dict) else -1
            before, since = self._still.get(run_id, (None, 0.0))
            if counter != before:
                self._still[run_id] = (counter, self.clock())
            elif self.clock() - since >= self.standstill_s and not self._lives(board.of_run(run_id)):
                found.append(run_id)
        return found

    @staticmethod
    def _lives(tasks: list[ListedJob]) -> bool:
        """Return whether scontrol knows a living job of a run that squeue doesn't show."""
        names = {
            (
                task.seen.job_id if task.seen else f"{task.submitted.job_id}_{task.submitted.runs.index(task.run_id)}"
            ): task
            for task in tasks
            if task.run_id is not None and (task.seen or task.submitted.job_id)
        }
        return any(slurm.lives(job_id, task.submitted.name) for job_id, task in names.items())

    def _just_submitted(self, jobs: SlurmJobs) -> set[str]:
        """Return runs of sbatch calls noticed less than a minute ago that the scheduler doesn't show yet."""
        shown = {job.name for job in self._seen.values()}
        now = time.monotonic()
        runs: set[str] = set()
        for submitted in jobs.submitted:
            first = self._first_seen.setdefault(submitted.number, now)
            if submitted.name not in shown and now - first < JUST_SUBMITTED_S:
                runs |= set(submitted.runs)
        return runs

    def _end_orphans(self, jobs: SlurmJobs, runs: list[str], board: JobTable) -> None:
        """Submit anew those that the cluster lost and whose `attempts` allow it, as `launch` does; seal the others, as supervisors
        do. Both by a command in a process: only these packages submit, and write seals."""
        endings = {run_id: self._ending_of(run_id, board.of_run(run_id)) for run_id in runs}
        most, cancelled = read_experiment(self.experiment).spec.attempts, reading.list_names(self.experiment.cancel)
        again = []
        for run_id, ending in endings.items():
            log.warning("%s has no job left: %s", run_id, ending.reason)
            launches = sum(run_id in each.runs and each.link == 1 and not each.asked_back for each in jobs.submitted)
            if ending.again and launches < most and run_id not in cancelled:
                again.append(run_id)
        if again and self._job("again", again) == 0:
            endings = {run_id: ending for run_id, ending in endings.items() if run_id not in again}
        if endings:
            self._job("seal", [{"run_id": run_id, **asdict(ending)} for run_id, ending in endings.items()])
        for run_id in runs:
            self._still.pop(run_id, None)  # a failed one is tried again later

    def _job(self, what: str, given: object) -> int:
        command = [sys.executable, "-m", "autorl_hpc", "job", what, str(self.experiment.path)]
        return subprocess.run(command, input=json.dumps(given).encode(), timeout=SEAL_LIMIT_S, check=False).returncode

    def _ending_of(self, run_id: str, tasks: list[ListedJob]) -> OrphanEnding:
        known = [task for task in tasks if task.seen is not None]
        bad = [task for task in known if task.state is JobState.ENDED]
        task = (bad or known or tasks)[-1]
        began = RunView.of(Ledger(self.experiment.run(run_id)).read()).attempt > 0
        shared = read_experiment(self.experiment).grader.placement == "step"
        base = task.submitted.job_id if task.seen is None else task.seen.job_id.partition("_")[0]
        index = "" if task.seen is None or task.seen.index is None else f"_{task.seen.index}"
        tail = reading.tail(Path(self.experiment.jobs) / f"{base}{index}_0_log.out", LOG_TAIL_BYTES)
        return explain(task, began=began, log_tail=tail, shared=shared)

    def _note(self, trouble: str | None) -> None:
        if self._generation is None:
            return
        jobs = tuple(sorted(self._seen.values(), key=lambda job: (job.name, job.number or 0, job.index or 0)))
        if self._written is not None and (self._written.jobs, self._written.trouble) == (jobs, trouble):
            return
        self._counter += 1
        self._written = SeenJobs(counter=self._counter, jobs=jobs, trouble=trouble)
        try:
            write_seen(self.experiment, self._written)
        except OSError as error:
            self._written = None
            log.warning("%s not written: %s", "seen.json", error)


def seal_what_is_lost(
    experiment: ExperimentDir, pause_s: float = FINISH_PAUSE_S, standstill_s: float = STANDS_STILL_S
) -> None:
    """Seal the runs that have no job left. Called once by an experiment's last job, in case no grader lived to do it."""
    record = read_experiment(experiment)
    if record.cluster is None:
        return
    me = f"finish-{host_name()}-{os.getpid()}"
    claims = Claims(experiment.claims, me, host_name(), HeartbeatWatch(experiment.graders, record.grader.stale_after_s))
    watcher = Watcher(experiment, claims, pause_s, standstill_s=standstill_s)
    deadline = time.monotonic() + record.grader.stale_after_s + standstill_s + FINISH_PATIENCE_S
    looks, may_end = 0, math.inf
    try:
        while True:
            try:
                if watcher.step():
                    looks, may_end = looks + 1, min(may_end, time.monotonic() + standstill_s)
            except (AutorlError, OSError) as error:
                log.warning("what is lost can't be sealed now: %s", error)
            enough = looks >= FINISH_LOOKS and time.monotonic() > may_end + FINISH_LOOKS * pause_s
            if enough or watcher.all_sealed() or time.monotonic() > deadline:
                return
            time.sleep(pause_s)
    finally:
        claims.drop_own()
