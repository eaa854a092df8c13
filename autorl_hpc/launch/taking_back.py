"""Taking back what a launch that failed had submitted, and finding again what nobody has noted any more."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from autorl_hpc.cluster import look
from autorl_hpc.cluster.board import Board, names_of, write_submitted
from autorl_hpc.cluster.commands import SchedulerError
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import reading
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.records.cluster import SlurmJobs, Submitted
from autorl_hpc.states import Fault

GONE_WAIT_S = 60.0
"""A job that is cancelled gets TERM, and KILL after the site's KillWait (30 s by default)."""

LOOK_S = 1.0
_NAME = re.compile(
    r"#SBATCH --job-name=\'?(?P<name>\S+\.(?P<role>agents|grader-\d+|report)(?:-\d+)?\.(?P<uid>[0-9a-f]{12}))\'?"
)
_NUMBER = re.compile(r"number (\d+)")


def take_back(experiment: ExperimentDir, before: SlurmJobs, made: Sequence[Submitted]) -> bool:
    """Cancels the jobs that a launch has made; whether the scheduler says that none is left.

    They are marked before they are cancelled: nobody takes their end for a person's scancel. The last of them may have been
    accepted though sbatch failed (a time-out), so they are looked for by name.
    """
    asked = [submitted.model_copy(update={"asked_back": True}) for submitted in made]
    jobs = before.model_copy(update={"submitted": (*before.submitted, *asked)})
    write_submitted(experiment, jobs)
    try:
        finish_taking_back(experiment, jobs)
    except SchedulerError:
        return False
    return True


def finish_taking_back(experiment: ExperimentDir, jobs: SlurmJobs) -> SlurmJobs:
    """Cancels what is still to be taken back, and notes that it is gone.

    Raises:
        SchedulerError: the scheduler doesn't answer, or a job doesn't end.
    """
    if not any(submitted.asked_back and not submitted.taken_back for submitted in jobs.submitted):
        return jobs
    deadline = time.monotonic() + GONE_WAIT_S
    cancelled: set[str] = set()
    while True:
        board = Board.of(jobs, look.jobs(names_of(jobs)), asked_back=True)
        left = [t.seen.job_id for t in board.alive() if t.submitted.asked_back and t.seen is not None]
        if not left:
            break
        look.cancel([job_id for job_id in left if job_id not in cancelled])
        cancelled |= set(left)
        if time.monotonic() > deadline:
            raise SchedulerError(
                f"jobs of a launch that failed don't end: {', '.join(left)}",
                where=experiment.path,
                fault=Fault.CLUSTER,
                next_step="see squeue; then launch again",
                exit_code=Exit.ENVIRONMENT,
            )
        time.sleep(LOOK_S)
    gone = [s.model_copy(update={"taken_back": True}) if s.asked_back else s for s in jobs.submitted]
    jobs = jobs.model_copy(update={"submitted": tuple(gone)})
    write_submitted(experiment, jobs)
    return jobs


def recovered(experiment: ExperimentDir, cluster: str) -> SlurmJobs | None:
    """Where slurm.json is gone: the experiment's own digits and numbers, out of the scripts in jobs/; None without any.

    Raises:
        AutorlError: jobs of the experiment still live, and nobody knows any more which run each of them stands for.
    """
    names: set[str] = set()
    uid, highest = "", 0
    for file in reading.list_names(experiment.jobs):
        if not file.endswith("_submission.sh"):
            continue
        text = (experiment.jobs / file).read_text(encoding="utf-8", errors="replace")
        found, number = _NAME.search(text), _NUMBER.search(text)
        if found and number:
            names.add(found["name"])
            uid, highest = found["uid"], max(highest, int(number[1]))
    if not names:
        return None
    alive = look.alive(look.jobs(names))
    if alive:
        raise AutorlError(
            f"slurm.json is gone, and {len(alive)} jobs of this experiment are in the queue: launching would submit them again",
            where=experiment.path,
            fault=Fault.CLUSTER,
            next_step=f"end them: scancel --name={','.join(sorted(names))}; then launch again",
            exit_code=Exit.FAILED,
        )
    past = Submitted(name=f"lost.{uid}", role="report", number=highest, taken_back=True)  # numbers go on from here
    return SlurmJobs(uid=uid, cluster=cluster, submitted=(past,))
