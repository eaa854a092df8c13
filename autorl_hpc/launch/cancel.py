"""`cancel`: mark runs, which their supervisors see within a second, and end the jobs if all are cancelled. What was
accepted is still scored."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from typing import Any

from autorl_hpc.cluster import slurm
from autorl_hpc.cluster.job_table import JobTable, ListedJob, names_of, read_submitted
from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.files.frozen_records import alive_jobs, read_experiment
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.queue import claimed_entries, drop
from autorl_hpc.files.run_view import RunView
from autorl_hpc.launch.jobs import job_environment
from autorl_hpc.launch.local import stop_all, supervisors
from autorl_hpc.launch.plan import only_one
from autorl_hpc.records.run import ExperimentRecord
from autorl_hpc.states import JobState

LOOK_S = 2.0
END_WAIT_S = 90.0  # a cancelled job gets TERM, and KILL after the site's KillWait (30 s by default)


def _alive(experiment: ExperimentDir, runs: Collection[str] | None = None) -> list[ListedJob]:
    jobs = read_submitted(experiment)
    if jobs is None:
        return []
    table = JobTable.of(jobs, slurm.jobs(names_of(jobs)), asked_back=True)
    return [task for task in table.alive() if runs is None or task.run_id in runs]


def _cancel_and_wait(experiment: ExperimentDir, runs: Collection[str] | None = None) -> list[str]:
    """Cancel the jobs of these runs, or all, and wait until they have ended; return the ids of those that do not end."""
    deadline = time.monotonic() + END_WAIT_S
    asked: set[str] = set()
    while ids := _ids(_alive(experiment, runs)):
        slurm.cancel([job_id for job_id in ids if job_id not in asked])
        asked |= set(ids)
        if time.monotonic() > deadline:
            return ids
        time.sleep(LOOK_S)
    return []


def _ids(tasks: Iterable[ListedJob]) -> list[str]:
    return [task.seen.job_id for task in tasks if task.seen is not None]


SEAL_WAIT_S, REPORT_WAIT_S = 60.0, 60.0
CLOSE_WAIT_S = 180.0  # for graders to score what was accepted; what is left is closed by the next launch
POLL_S, CLUSTER_POLL_S = 0.3, 3.0  # on a cluster each poll asks the scheduler
WAIT_WORDS = f"sealed; waiting at most {CLOSE_WAIT_S:.0f} s for a grader to score what was accepted and close the runs"


def cancel_runs(
    experiment: ExperimentDir, runs: list[str], say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Cancel these runs, or all, and wait until they are sealed. Return the facts for `--json`. Raises AutorlError: no such run."""
    record = read_experiment(experiment)
    unknown = [run for run in runs if run not in record.runs]
    if unknown:
        advice = "see `autorl-hpc status` for the run ids"
        raise AutorlError(f"this experiment has no run {unknown[0]}", where=experiment.path, next_step=advice)
    wanted = runs or list(record.runs)
    for name in wanted:  # no mark for all: runs that a later launch adds are not cancelled
        (experiment.cancel / name).touch()
    say(f"cancelling {len(wanted)} runs: ending their agents (ctrl-C is safe: the marks are set)")
    # A launch that is still submitting would add jobs behind us.
    with nullcontext() if record.cluster is None else only_one(experiment, say):
        open_runs, left = _cancel(experiment, record, wanted, say, everything=not runs)
    not_closed = _not_closed(experiment, wanted)
    text = f"{len(wanted)} runs cancelled, {len(wanted) - len(not_closed)} of them closed"
    if open_runs:
        text += f"; still not sealed: {', '.join(open_runs)} (their supervisors don't answer)"
    elif not_closed:
        text += "; the others wait for a grader: `autorl-hpc launch` again scores what was accepted and closes them"
    if left:
        text += f"; jobs that would not end: {', '.join(left)}"
    return {"cancelled": wanted, "not_sealed": open_runs, "jobs_left": left, "text": text}


def _cancel(
    experiment: ExperimentDir, record: ExperimentRecord, wanted: list[str], say: Callable[[str], None], everything: bool
) -> tuple[list[str], list[str]]:
    """Seal runs that wait for a job or lost it; running supervisors seal theirs. Return the unsealed runs, and jobs that are left."""
    local, running = record.cluster is None, set[str | None]()
    # In `placement: step` graders are in the agents' jobs.
    role, poll_s = "agents" if record.grader.placement == "step" else "grader-", POLL_S if local else CLUSTER_POLL_S

    def roles() -> list[str]:
        """Return the roles of the jobs that run."""
        if local:
            return [job.role for job in alive_jobs(experiment)]
        return [task.submitted.role for task in _alive(experiment) if task.state is JobState.RUNNING]

    def unsealed() -> list[str]:
        return [run for run in wanted if RunView.of(Ledger(experiment.run(run)).read()).sealed is None]

    def gradable() -> list[str]:
        """Return the runs that a running grader may still close."""
        return _not_closed(experiment, wanted) if any(each.startswith(role) for each in roles()) else []

    if not local:
        tasks = _alive(experiment, wanted)
        slurm.cancel(_ids(task for task in tasks if task.state is not JobState.RUNNING))
        running = {task.run_id for task in tasks if task.state is JobState.RUNNING}
    _seal_here(experiment, record, [run for run in unsealed() if run not in running])
    open_runs = _wait(SEAL_WAIT_S, unsealed)
    if open_runs and not local:
        _cancel_and_wait(experiment, open_runs)
        _seal_here(experiment, record, open_runs)
        open_runs = unsealed()
    if not open_runs and gradable():
        say(WAIT_WORDS)
        _wait(CLOSE_WAIT_S, gradable, poll_s)
    if not everything:
        if not local:
            _cancel_and_wait(experiment, wanted)
        return open_runs, []
    if not _not_closed(experiment, record.runs):  # jobs see that it is over, and the last one writes the report
        _wait(REPORT_WAIT_S, roles if local else lambda: _ids(_alive(experiment)), poll_s)
    left = [str(job.pid) for job in stop_all(experiment)] if local else _cancel_and_wait(experiment)
    for entry in claimed_entries(experiment.claims) if not (left or local) else ():
        drop(experiment.claims, entry)  # which cancelled graders could not give back
    return open_runs, left


def _not_closed(experiment: ExperimentDir, runs: Iterable[str]) -> list[str]:
    closed = set(reading.list_names(experiment.finished))
    return [run for run in runs if run not in closed]


def _seal_here(experiment: ExperimentDir, record: ExperimentRecord, runs: list[str]) -> None:
    """Seal runs without a supervisor: one is started, sees the mark and seals. Runs whose supervisor runs on this host are left to it."""
    here = supervisors(experiment)
    for run in (run for run in runs if run not in here):
        command = [sys.executable, "-m", "autorl_hpc", "job", "agent", str(experiment.path.resolve()), run]
        environment = job_environment(experiment, record)
        subprocess.run(command, env=environment, cwd=experiment.jobs, capture_output=True, check=False)


def _wait(limit_s: float, due: Callable[[], list[str]], poll_s: float = POLL_S) -> list[str]:
    deadline = time.monotonic() + limit_s
    while (left := due()) and time.monotonic() < deadline:
        time.sleep(poll_s)
    return left
