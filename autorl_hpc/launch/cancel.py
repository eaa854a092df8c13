"""`cancel`: a mark in the experiment's cancel folder, which supervisors see within a second; then the jobs, if asked for
everything. What was accepted is still scored and the runs are closed, so a cancelled run has a report too."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.files.jobs import alive_jobs
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.records import read_experiment
from autorl_hpc.files.view import RunView
from autorl_hpc.launch.cancel_slurm import SlurmJobsOf
from autorl_hpc.launch.environment import job_environment
from autorl_hpc.launch.local import stop_all
from autorl_hpc.launch.lock import only_one
from autorl_hpc.launch.payload import supervisors
from autorl_hpc.records.run import ExperimentRecord

SEAL_WAIT_S = 60.0
CLOSE_WAIT_S = 180.0
"""For graders to score what was accepted; what is not closed then is closed by the next launch."""

REPORT_WAIT_S = 60.0
POLL_S = 0.3
CLUSTER_POLL_S = 3.0
"""Each look asks the scheduler."""

WAIT_WORDS = f"sealed; waiting at most {CLOSE_WAIT_S:.0f} s for a grader to score what was accepted and close the runs"


def cancel_runs(
    experiment: ExperimentDir, runs: list[str], say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Cancels the given runs, or all, and waits until they are sealed.

    Raises:
        AutorlError: a run id that the experiment doesn't have.
    """
    record = read_experiment(experiment)
    unknown = [run for run in runs if run not in record.runs]
    if unknown:
        raise AutorlError(
            f"this experiment has no run {unknown[0]}",
            where=experiment.path,
            next_step="see `autorl-hpc status` for the run ids",
        )
    wanted = runs or list(record.runs)
    for name in wanted:  # not one mark for all: runs that a later launch adds are not cancelled
        (experiment.cancel / name).touch()
    say(f"cancelling {len(wanted)} runs: ending their agents (ctrl-C is safe: the marks are set)")
    if record.cluster is None:
        open_runs, left = _cancel_here(experiment, record, wanted, say, everything=not runs)
    else:
        with only_one(experiment, say):  # a launch that is still submitting would go on behind our back
            open_runs, left = _cancel_on_cluster(experiment, record, wanted, say, everything=not runs)
    closed = set(reading.list_names(experiment.finished))
    text = f"{len(wanted)} runs cancelled, {len([r for r in wanted if r in closed])} of them closed"
    if open_runs:
        text += f"; still not sealed: {', '.join(open_runs)} (their supervisors don't answer)"
    elif len([r for r in wanted if r in closed]) < len(wanted):
        text += "; the others wait for a grader: `autorl-hpc launch` again scores what was accepted and closes them"
    if left:
        text += f"; jobs that would not end: {', '.join(left)}"
    return {"cancelled": wanted, "not_sealed": open_runs, "jobs_left": left, "text": text}


def _cancel_here(
    experiment: ExperimentDir, record: ExperimentRecord, wanted: list[str], say: Callable[[str], None], everything: bool
) -> tuple[list[str], list[str]]:
    """On this machine; the runs that are not sealed, and the jobs that are left."""
    _seal_here(experiment, record, wanted)
    open_runs = _wait(SEAL_WAIT_S, lambda: [run for run in wanted if not _view(experiment, run).sealed])
    if any(job.role.startswith("grader") for job in alive_jobs(experiment)) and not open_runs:
        say(WAIT_WORDS)
        _wait(CLOSE_WAIT_S, lambda: _not_closed(experiment, wanted) if alive_jobs(experiment) else [])
    if not _not_closed(experiment, record.runs):  # the jobs see that it is over, and the last one writes the report
        _wait(REPORT_WAIT_S, lambda: [job.role for job in alive_jobs(experiment)])
    left = stop_all(experiment) if everything else []
    return open_runs, [str(job.pid) for job in left]


def _cancel_on_cluster(
    experiment: ExperimentDir, record: ExperimentRecord, wanted: list[str], say: Callable[[str], None], everything: bool
) -> tuple[list[str], list[str]]:
    """On Slurm: what waits never starts, what runs seals itself, what doesn't is cancelled and sealed here."""
    jobs = SlurmJobsOf(experiment, step=record.grader.placement == "step")
    running = jobs.cancel_waiting(wanted)
    _seal_here(experiment, record, [run for run in wanted if run not in running])
    open_runs = _wait(SEAL_WAIT_S, lambda: [run for run in wanted if not _view(experiment, run).sealed])
    if open_runs:
        jobs.cancel_runs(open_runs)
        _seal_here(experiment, record, open_runs)
        open_runs = [run for run in open_runs if not _view(experiment, run).sealed]
    if not open_runs and jobs.graders_run():
        say(WAIT_WORDS)
        _wait(
            CLOSE_WAIT_S, lambda: _not_closed(experiment, wanted) if jobs.graders_run() else [], poll_s=CLUSTER_POLL_S
        )
    if not everything:
        jobs.cancel_runs(wanted)
        return open_runs, []
    if not _not_closed(experiment, record.runs):  # links of the chain see that it is over, and the report is written
        _wait(REPORT_WAIT_S, lambda: [task.submitted.name for task in jobs.board().alive()], poll_s=CLUSTER_POLL_S)
    return open_runs, jobs.end()


def _not_closed(experiment: ExperimentDir, runs: Iterable[str]) -> list[str]:
    closed = set(reading.list_names(experiment.finished))
    return [run for run in runs if run not in closed]


def _seal_here(experiment: ExperimentDir, record: ExperimentRecord, runs: list[str]) -> None:
    """A run that waits for a place, or whose supervisor is gone, gets one, which sees the mark and seals.

    One whose supervisor lives here is left to it.
    """
    here = supervisors(experiment)
    for run in runs:
        if run not in here and not _view(experiment, run).sealed:
            command = [sys.executable, "-m", "autorl_hpc", "job", "agent", str(experiment.path.resolve()), run]
            environment = job_environment(experiment, record)
            subprocess.run(command, env=environment, cwd=experiment.jobs, capture_output=True, check=False)


def _view(experiment: ExperimentDir, run: str) -> RunView:
    return RunView.of(Ledger(experiment.run(run)).read())


def _wait(limit_s: float, due: Callable[[], list[str]], poll_s: float = POLL_S) -> list[str]:
    deadline = time.monotonic() + limit_s
    while (left := due()) and time.monotonic() < deadline:
        time.sleep(poll_s)
    return list(left)
