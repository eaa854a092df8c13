"""What the scheduler knows of our jobs, found by our own names and not by job numbers, which it may give out again.

squeue with all states answers for living jobs and, for some minutes, for those that ended (MinJobAge); scontrol tells exit
codes of the same; sacct is asked only for what both have forgotten, where there is accounting.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence

from autorl_hpc.cluster import commands
from autorl_hpc.records.cluster import SeenJob
from autorl_hpc.states import job_state

SEPARATOR = "\x1f"
"""No job name, comment or reason holds it."""

FIELDS = ("%i", "%j", "%T", "%r", "%N", "%k", "%V")
COMMENT = re.compile(r"autorl-hpc \S+ number (\d+)")
_NO_ACCOUNTING = ("accounting storage is disabled", "there is no sacct")
PER_CALL = 200
"""Names in one squeue: a command line has its limit."""


def comment(uid: str, number: int) -> str:
    """The comment that tells one sbatch call of ours from another of the same name."""
    return f"autorl-hpc {uid} number {number}"


def jobs(names: Iterable[str]) -> list[SeenJob]:
    """Our jobs of these names, arrays task by task, the newest sbatch call last.

    Raises:
        SchedulerError: the scheduler doesn't answer.
    """
    wanted = sorted(set(names))
    found: list[SeenJob] = []
    for start in range(0, len(wanted), PER_CALL):
        argv = [
            *("squeue", "--noheader", "--array", "--states=all", f"--user={os.geteuid()}"),
            *(f"--name={','.join(wanted[start : start + PER_CALL])}", f"--format={SEPARATOR.join(FIELDS)}"),
        ]
        found += [job for line in commands.run(argv).splitlines() if (job := _from_squeue(line)) is not None]
    return sorted(found, key=lambda job: (job.number or 0, job.index or 0, job.submitted_at or ""))


def _from_squeue(line: str) -> SeenJob | None:
    parts = line.split(SEPARATOR)
    if len(parts) != len(FIELDS):
        return None
    job_id, name, state, reason, nodes, said, submitted = (part.strip() for part in parts)
    number = COMMENT.search(said)
    task = re.fullmatch(r"\d+_(\d+)", job_id)
    return SeenJob(
        name=name,
        number=int(number[1]) if number else None,
        job_id=job_id,
        index=int(task[1]) if task else None,
        state=state,
        reason=None if reason in ("", "None") else reason,
        nodes=nodes or None,
        submitted_at=submitted or None,
    )


def with_exit_codes(seen: Sequence[SeenJob], job_id: str) -> list[SeenJob]:
    """The same jobs; those of this number (an array's: of all its tasks) with exit code and restarts by one scontrol call."""
    try:
        text = commands.run(["scontrol", "--oneliner", "show", "job", job_id.partition("_")[0]])
    except commands.SchedulerError:
        return list(seen)  # forgotten meanwhile
    told = {_people_id(words): words for words in map(_words, text.splitlines()) if "JobId" in words}
    return [_completed(job, told[job.job_id]) if job.job_id in told else job for job in seen]


def _words(line: str) -> dict[str, str]:
    """`Key=value` of scontrol's one line; a value ends where the next key begins."""
    return {
        m[1]: m[2].strip() for m in re.finditer(r"(?:^|\s)([A-Za-z][\w:/&*]*)=(.*?)(?=\s[A-Za-z][\w:/&*]*=|$)", line)
    }


def _people_id(words: dict[str, str]) -> str:
    if words.get("ArrayTaskId", "").isdigit():
        return f"{words['ArrayJobId']}_{words['ArrayTaskId']}"
    return words["JobId"]


def _completed(job: SeenJob, words: dict[str, str]) -> SeenJob:
    if words.get("JobName") != job.name:
        return job  # the number was given out again
    return job.model_copy(
        update={
            "exit_code": words.get("ExitCode"),
            "restarts": int(words["Restarts"]) if words.get("Restarts", "").isdigit() else 0,
            "reason": words.get("Reason") if words.get("Reason") not in (None, "None", "") else job.reason,
        }
    )


def accounting(names: Iterable[str]) -> list[SeenJob] | None:
    """Our jobs by sacct, or None where there is no accounting or its database can't be reached. Several records of one job:
    the last stands.

    Raises:
        SchedulerError: sacct failed otherwise.
    """
    argv = [
        *("sacct", "--noheader", "--allocations", "--parsable2", f"--delimiter={SEPARATOR}", f"--uid={os.geteuid()}"),
        *("--starttime=now-60days", f"--name={','.join(sorted(set(names)))}"),
        "--format=JobID,JobName,State,ExitCode,NodeList,Comment,Submit",
    ]
    try:
        text = commands.run(argv)
    except commands.SchedulerError as error:
        if any(words in error.what.lower() for words in _NO_ACCOUNTING):
            return None
        raise
    found: dict[tuple[str, str], SeenJob] = {}
    for line in text.splitlines():
        parts = line.split(SEPARATOR)
        if len(parts) != 7 or "[" in parts[0]:
            continue
        job_id, name, state, code, nodes, said, submitted = parts
        number = COMMENT.search(said)
        task = re.fullmatch(r"\d+_(\d+)", job_id)
        job = SeenJob(
            name=name,
            number=int(number[1]) if number else None,
            job_id=job_id,
            index=int(task[1]) if task else None,
            state=state,
            nodes=None if nodes in ("", "None assigned") else nodes,
            exit_code=code or None,
            submitted_at=submitted or None,
        )
        found[(job_id, name)] = job
    return list(found.values())


def alive(seen: Iterable[SeenJob]) -> list[SeenJob]:
    """Those of which something may still come."""
    return [job for job in seen if not job_state(job.state).over]


def cancel(job_ids: Sequence[str]) -> None:
    """scancel of these jobs; one that has ended already is no error.

    Raises:
        SchedulerError: the scheduler doesn't answer.
    """
    for start in range(0, len(job_ids), PER_CALL):
        try:
            commands.run(["scancel", *job_ids[start : start + PER_CALL]])
        except commands.SchedulerError as error:
            if "invalid job id" not in error.what.lower() and "already completing" not in error.what.lower():
                raise


def own_job() -> tuple[str, float | None] | None:
    """This process's job: Slurm's word for its state and the seconds until its time limit; None if it can't be told.

    Where squeue can't be asked (inside a container), newer versions of Slurm tell the end in a variable.
    """
    job_id = os.environ.get("SLURM_JOB_ID")
    if job_id is None:
        return None
    try:
        text = commands.run(["squeue", "--noheader", f"--jobs={job_id}", "--states=all", "--format=%T %L"])
    except commands.SchedulerError:
        end = os.environ.get("SLURM_JOB_END_TIME", "")
        return ("RUNNING", int(end) - time.time()) if end.isdigit() else None
    state, _, left = text.strip().partition(" ")
    return (state, duration_s(left.strip())) if state else None


def duration_s(text: str) -> float | None:
    """Seconds of Slurm's `[days-]hours:minutes:seconds`, `minutes:seconds` or `minutes`; None for UNLIMITED and the like."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:  # days-hours[:minutes[:seconds]]
        parts += [0] * (3 - len(parts))
    elif len(parts) == 1:  # minutes
        parts = [0, parts[0], 0]
    elif len(parts) == 2:
        parts = [0, *parts]
    hours, minutes, seconds = parts
    return float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds)
