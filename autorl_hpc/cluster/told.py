"""The head of an experiment in the comment of its report job: the scheduler's database lies outside the account's files.

The job's own user may write the comment again, so this is worth less than a head that somebody else keeps.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass

from autorl_hpc.cluster import commands, look
from autorl_hpc.records.cluster import SlurmJobs
from autorl_hpc.records.evidence import SHORT_HEX

log = logging.getLogger("autorl_hpc.jobs")
HEAD = re.compile(rf" head ([0-9a-f]{{{SHORT_HEX}}})\b")


@dataclass(frozen=True)
class Told:
    """What a job's comment says."""

    job_id: str
    number: int
    short: str


def tell(short: str) -> bool:
    """Writes the short form of a head into the comment of the job that this process runs in; False where that can't be done.

    A site may forbid it, and a container may lack the clients: nothing depends on it.
    """
    job_id = os.environ.get("SLURM_JOB_ID")
    if not job_id:
        return False
    try:
        said = commands.run(["squeue", "--noheader", f"--jobs={job_id}", "--states=all", "--format=%k"]).strip()
        # What stands there is how our jobs are told apart: it stays in front.
        commands.run(["scontrol", "update", f"JobId={job_id}", f"Comment={HEAD.sub('', said)} head {short}"])
    except commands.SchedulerError as error:
        log.warning("the head is not in the job's comment: %s", error.what)
        return False
    return True


def told(jobs: SlurmJobs) -> list[Told]:
    """The heads in the comments of an experiment's report jobs, the newest job last.

    Raises:
        SchedulerError: the scheduler doesn't answer.
    """
    names = sorted({submitted.name for submitted in jobs.submitted if submitted.role == "report"})
    if not names:
        return []
    found: dict[int, Told] = {}
    for line in [*_accounting(names), *_queue(names)]:  # the queue's word is the newer one
        job_id, _, said = line.partition(look.SEPARATOR)
        head, number = HEAD.search(said), look.COMMENT.search(said)
        if head is not None and number is not None and f"autorl-hpc {jobs.uid} " in said:
            found[int(number[1])] = Told(job_id, int(number[1]), head[1])
    return [found[number] for number in sorted(found)]


def _queue(names: list[str]) -> list[str]:
    argv = ["squeue", "--noheader", "--states=all", f"--name={','.join(names)}", f"--format=%i{look.SEPARATOR}%k"]
    return commands.run(argv).splitlines()


def _accounting(names: list[str]) -> list[str]:
    """Nothing where there is no accounting: then the queue alone knows, for some minutes."""
    argv = [
        *("sacct", "--noheader", "--allocations", "--allusers", "--parsable2", f"--delimiter={look.SEPARATOR}"),
        *("--starttime=now-365days", f"--name={','.join(names)}", "--format=JobID,Comment"),
    ]
    try:
        return commands.run(argv).splitlines()
    except commands.SchedulerError as error:
        log.info("sacct could not be asked: %s", error.what)
        return []
