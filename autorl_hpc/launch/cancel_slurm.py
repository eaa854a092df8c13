"""`cancel` on a Slurm cluster: what waits is cancelled, what runs is asked to end, and in the end nothing is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from autorl_hpc.cluster import look
from autorl_hpc.cluster.board import Board, Task, names_of, read_submitted
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.claims import claimed_entries
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.states import JobState

LOOK_S = 2.0
END_WAIT_S = 90.0
"""A job that is cancelled gets TERM, and KILL after the site's KillWait (30 s by default)."""


class SlurmJobsOf:
    """The jobs of one experiment, for cancelling."""

    def __init__(self, experiment: ExperimentDir, *, step: bool) -> None:
        self.experiment = experiment
        self.step = step

    def board(self) -> Board:
        """As the scheduler shows them now.

        Raises:
            SchedulerError: it doesn't answer.
        """
        jobs = read_submitted(self.experiment)
        return Board() if jobs is None else Board.of(jobs, look.jobs(names_of(jobs)), asked_back=True)

    def cancel_waiting(self, runs: Iterable[str]) -> set[str]:
        """Cancels the tasks of these runs that have no place yet; the runs of which a task has one."""
        wanted = set(runs)
        tasks = [task for task in self.board().alive() if task.run_id in wanted]
        look.cancel(_ids(task for task in tasks if task.state is not JobState.RUNNING))
        return {task.run_id for task in tasks if task.state is JobState.RUNNING and task.run_id}

    def cancel_runs(self, runs: Iterable[str]) -> None:
        """Cancels every task of these runs and waits until they have ended."""
        wanted = set(runs)
        self._cancel_and_wait(lambda: [task for task in self.board().alive() if task.run_id in wanted])

    def end(self) -> list[str]:
        """Cancels whatever is left of the experiment's jobs; the numbers of those that would not end. Claims of jobs that
        could not give them back go too."""
        left = self._cancel_and_wait(lambda: self.board().alive())
        if not left:
            for entry in claimed_entries(self.experiment.claims):
                for name in reading.list_names(self.experiment.claims):
                    if name.startswith(f"{entry}.g"):
                        atomic.unlink_quietly(self.experiment.claims / name)
        return left

    def graders_run(self) -> bool:
        """Whether a grader has a place and may still close runs; in `placement: step` they are in the agents' jobs."""
        role = "agents" if self.step else "grader-"
        return any(
            task.state is JobState.RUNNING and task.submitted.role.startswith(role) for task in self.board().alive()
        )

    def _cancel_and_wait(self, alive: Callable[[], list[Task]]) -> list[str]:
        deadline = time.monotonic() + END_WAIT_S
        asked: set[str] = set()
        while ids := _ids(alive()):
            look.cancel([job_id for job_id in ids if job_id not in asked])
            asked |= set(ids)
            if time.monotonic() > deadline:
                return ids
            time.sleep(LOOK_S)
        return []


def _ids(tasks: Iterable[Task]) -> list[str]:
    return [task.seen.job_id for task in tasks if task.seen is not None]
