"""`cancel`: a mark in the experiment's cancel folder, which supervisors see within a second; then the jobs, if asked for
everything. What was accepted is still scored and the runs are closed, so a cancelled run has a report too."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.files.jobs import alive_jobs
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.records import read_experiment
from autorl_hpc.files.view import RunView
from autorl_hpc.launch.launcher import job_environment
from autorl_hpc.launch.local import stop_all
from autorl_hpc.launch.payload import supervisors
from autorl_hpc.records.run import ExperimentRecord

SEAL_WAIT_S = 60.0
CLOSE_WAIT_S = 180.0
"""For graders to score what was accepted; what is not closed then is closed by the next launch."""

REPORT_WAIT_S = 60.0
POLL_S = 0.3


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
    _seal_here(experiment, record, wanted)
    open_runs = _wait(SEAL_WAIT_S, lambda: [run for run in wanted if not _view(experiment, run).sealed])
    graders = any(job.role.startswith("grader") for job in alive_jobs(experiment))
    if graders and not open_runs:
        say(f"sealed; waiting at most {CLOSE_WAIT_S:.0f} s for a grader to score what was accepted and close the runs")
        _wait(
            CLOSE_WAIT_S,
            lambda: (
                [run for run in wanted if run not in reading.list_names(experiment.finished)]
                if alive_jobs(experiment)
                else []
            ),
        )
    closed = set(reading.list_names(experiment.finished))
    if set(record.runs) <= closed:  # the jobs see that it is over, and the last one writes the report
        _wait(REPORT_WAIT_S, lambda: [job.role for job in alive_jobs(experiment)])
    left = [] if runs else stop_all(experiment)
    closed = set(reading.list_names(experiment.finished))
    text = f"{len(wanted)} runs cancelled, {len([r for r in wanted if r in closed])} of them closed"
    if open_runs:
        text += f"; still not sealed: {', '.join(open_runs)} (their supervisors don't answer)"
    elif len([r for r in wanted if r in closed]) < len(wanted):
        text += "; the others wait for a grader: `autorl-hpc launch` again scores what was accepted and closes them"
    return {"cancelled": wanted, "not_sealed": open_runs, "jobs_left": [j.pid for j in left], "text": text}


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


def _wait(limit_s: float, due: Any) -> list[str]:
    deadline = time.monotonic() + limit_s
    while (left := due()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return list(left)
