"""Which of our jobs stands for which run or grader, and whether anything may still come of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autorl_hpc.files import atomic, reading
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.cluster import SeenJob, SeenJobs, SlurmJobs, Submitted
from autorl_hpc.states import JobState, job_state

SUBMITTED_NAME = "slurm.json"
SEEN_NAME = "seen.json"


def read_submitted(experiment: ExperimentDir) -> SlurmJobs | None:
    """What launches submitted; None before the first.

    Raises:
        AutorlError: the file is damaged.
        OSError: it can't be read.
    """
    # Not in jobs/: should that be deleted, the watcher must still know its jobs.
    path = experiment.path / SUBMITTED_NAME
    if SUBMITTED_NAME not in reading.list_names(experiment.path):
        return None
    return parse_record(SlurmJobs, reading.read_json(path), path)


def write_submitted(experiment: ExperimentDir, jobs: SlurmJobs) -> None:
    """Replaces slurm.json."""
    atomic.write_json(experiment.path / SUBMITTED_NAME, jobs.model_dump(mode="json"))


def read_seen(experiment: ExperimentDir) -> SeenJobs:
    """What the watcher last saw; nothing where it never looked or the file can't be read now."""
    path = experiment.path / SEEN_NAME
    value = reading.read_json_or_none(path)
    return SeenJobs(counter=0) if value is None else parse_record(SeenJobs, value, path)


def write_seen(experiment: ExperimentDir, seen: SeenJobs) -> None:
    """Replaces seen.json."""
    atomic.write_bytes(experiment.path / SEEN_NAME, seen.canonical() + b"\n")


@dataclass(frozen=True)
class Task:
    """One job, or one task of an array, of ours; `seen` is None where the scheduler doesn't know it."""

    submitted: Submitted
    run_id: str | None
    seen: SeenJob | None

    @property
    def state(self) -> JobState:
        return JobState.GONE if self.seen is None else job_state(self.seen.state)


@dataclass
class Board:
    """Every job of an experiment that was submitted and not taken back."""

    tasks: list[Task] = field(default_factory=list)

    @classmethod
    def of(cls, jobs: SlurmJobs, seen: Iterable[SeenJob], *, asked_back: bool = False) -> Board:
        """Brings what was submitted and what the scheduler says together, by name, never by number alone.

        Args:
            asked_back: also what a failed launch is taking back, for those who clear away.
        """
        by_name: dict[str, list[SeenJob]] = {}
        for job in seen:
            by_name.setdefault(job.name, []).append(job)
        board = cls()
        for submitted in jobs.submitted:
            if submitted.taken_back or (submitted.asked_back and not asked_back):
                continue
            mine = [job for job in by_name.get(submitted.name, []) if _is_of(job, submitted)]
            if not submitted.runs:
                board.tasks.append(Task(submitted, None, mine[-1] if mine else None))
                continue
            by_index = {job.index: job for job in mine}
            for index, run_id in enumerate(submitted.runs):
                board.tasks.append(Task(submitted, run_id, by_index.get(index)))
        return board

    def of_run(self, run_id: str) -> list[Task]:
        """The tasks that stand for a run, in the order in which they were submitted."""
        return [task for task in self.tasks if task.run_id == run_id]

    def alive(self, role: str | None = None) -> list[Task]:
        """Tasks of which something may still come."""
        return [task for task in self.tasks if not task.state.over and role in (None, task.submitted.role)]

    def alive_runs(self) -> set[str]:
        """Runs for which a task may still work."""
        return {task.run_id for task in self.alive() if task.run_id is not None}


def _is_of(job: SeenJob, submitted: Submitted) -> bool:
    """Links of one chain share their name: the number in the comment tells them apart, else the job's."""
    if job.number is not None:
        return job.number == submitted.number
    return submitted.job_id is None or job.job_id.partition("_")[0] == submitted.job_id


def names_of(jobs: SlurmJobs) -> Sequence[str]:
    """Every name that was submitted under."""
    return sorted({submitted.name for submitted in jobs.submitted if not submitted.taken_back})
