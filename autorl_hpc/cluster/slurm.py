"""Slurm's clients, called so that they can't hang the suite and don't obey a surrounding job's variables."""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autorl_hpc.cluster.vllm_program import ask
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.records.cluster import SeenJob, SlurmJobs
from autorl_hpc.records.exchange import SHORT_HEX
from autorl_hpc.states import Fault, job_state

TIMEOUT_S = 30.0
"""A client waits 9 s for a controller that is gone (measured); a busy controller may take longer."""

PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SCONTROL_", "SACCT_", "SINFO_", "SCANCEL_")
"""Variables that change what a client does or prints, or that a surrounding job left behind."""

KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS")
"""Where the cluster is."""


class SchedulerError(AutorlError):
    """A client failed, or is not here. `what` holds the scheduler's own words."""


def without_scheduler(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without what belongs to a surrounding job or to a person's habits of printing."""
    return {name: value for name, value in env.items() if not name.startswith(PREFIXES) or name in KEPT}


def available() -> bool:
    """Whether this host has Slurm's clients."""
    return all(shutil.which(name) is not None for name in ("sbatch", "squeue", "scancel", "scontrol"))


def run(argv: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> str:
    """What a client prints.

    Raises:
        SchedulerError: it is not here, failed, or did not answer in time.
    """
    env = {**without_scheduler(os.environ), "LC_ALL": "C", "SLURM_TIME_FORMAT": "%Y-%m-%dT%H:%M:%S"}
    answer = ask(argv, env=env, limit_s=timeout_s)
    if answer.missing:
        raise SchedulerError(
            f"there is no {argv[0]} on this host",
            fault=Fault.CLUSTER,
            next_step="run this on a login node of the cluster, or use `--cluster local`",
            exit_code=Exit.ENVIRONMENT,
        )
    if answer.code != 0:
        raise failed(argv[0], answer.err or answer.out)
    return answer.out


def failed(client: str, words: str) -> SchedulerError:
    """The scheduler's refusal, in its own words."""
    lines = [line.strip() for line in words.strip().splitlines() if line.strip()]
    return SchedulerError(
        f"{client}: {' | '.join(lines)[:1000] or 'it failed without a word'}",
        fault=Fault.CLUSTER,
        next_step=_advice(words),
        exit_code=Exit.ENVIRONMENT,
    )


ADVICE = (
    ("invalid account", "set `account` in the cluster's profile to one of yours: sacctmgr show assoc user=$USER"),
    ("invalid partition", "set `partition` in the cluster's profile to one that sinfo shows"),
    ("not permitted to use this partition", "set `partition` in the cluster's profile to one that you may use"),
    ("invalid qos", "set `qos` in the cluster's profile to one that your account has"),
    ("invalid feature", "set `constraint` in the cluster's profile to features that sinfo -o %f shows"),
    ("reservation is invalid", "set `reservation` in the profile to one that scontrol show reservation lists"),
    ("requested node configuration is not available", "ask for fewer GPUs, CPUs or less memory than one node has"),
    ("more processors requested than permitted", "ask for fewer CPUs than one node has"),
    ("memory specification", "ask for less memory than one node has"),
    ("invalid generic resource", "set `gpu_wording` and `gpu_type` in the profile as sinfo -o %G shows them"),
    ("requested time limit is invalid", "set `limits: {max_time: ...}` in the profile to what the partition allows"),
    ("invalid job array", "set `limits: {max_array_size: N}` in the profile to what scontrol show config says"),
    # Before a refusal by policy, the limit that was met stands in a line of its own.
    ("maxwall", "set `limits: {max_time: ...}` in the profile to MaxWall of your qos or account"),
    ("submitjob", "wait until some of your jobs have ended, or launch fewer runs at once"),
    ("maxjobs", "wait until some of your jobs have ended, or launch fewer runs at once"),
    ("maxgres", "ask for fewer GPUs a job: your qos or account has a limit"),
    ("pertres", "ask for fewer GPUs, CPUs or less memory a job: your qos or account has a limit"),
    ("job violates accounting/qos policy", "your account's limits forbid it: fewer jobs, shorter, or another qos"),
    ("unable to contact slurm controller", "the scheduler is down: the same command again, later"),
    ("socket timed out", "the scheduler is busy or down: the same command again, later"),
    (
        "establish a configuration source",
        "this host has no slurm.conf: go to a login node of the cluster, or set SLURM_CONF",
    ),
)
"""What sbatch is known to say, and what helps."""


def _advice(words: str) -> str:
    said = words.lower()
    return next((advice for part, advice in ADVICE if part in said), "see the scheduler's words")


# What the scheduler knows of our jobs, found by our own names and not by job numbers, which it may give out again.
#
# squeue with all states answers for living jobs and, for some minutes, for those that ended (MinJobAge); scontrol tells exit
# codes of the same; sacct is asked only for what both have forgotten, where there is accounting.

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
        found += [job for line in run(argv).splitlines() if (job := _from_squeue(line)) is not None]
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
        text = run(["scontrol", "--oneliner", "show", "job", job_id.partition("_")[0]])
    except SchedulerError:
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
        text = run(argv)
    except SchedulerError as error:
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
            run(["scancel", *job_ids[start : start + PER_CALL]])
        except SchedulerError as error:
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
        text = run(["squeue", "--noheader", f"--jobs={job_id}", "--states=all", "--format=%T %L"])
    except SchedulerError:
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


# The head of an experiment in the comment of its report job: the scheduler's database lies outside the account's files.
#
# The job's own user may write the comment again, so this is worth less than a head that somebody else keeps.

log = logging.getLogger("autorl_hpc.jobs")
HEAD = re.compile(rf" head ([0-9a-f]{{{SHORT_HEX}}})\b")


@dataclass(frozen=True)
class JobComment:
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
        said = run(["squeue", "--noheader", f"--jobs={job_id}", "--states=all", "--format=%k"]).strip()
        # What stands there is how our jobs are told apart: it stays in front.
        run(["scontrol", "update", f"JobId={job_id}", f"Comment={HEAD.sub('', said)} head {short}"])
    except SchedulerError as error:
        log.warning("the head is not in the job's comment: %s", error.what)
        return False
    return True


def told(jobs: SlurmJobs) -> list[JobComment]:
    """The heads in the comments of an experiment's report jobs, the newest job last.

    Raises:
        SchedulerError: the scheduler doesn't answer.
    """
    names = sorted({submitted.name for submitted in jobs.submitted if submitted.role == "report"})
    if not names:
        return []
    found: dict[int, JobComment] = {}
    for line in [*_accounting(names), *_queue(names)]:  # the queue's word is the newer one
        job_id, _, said = line.partition(SEPARATOR)
        head, number = HEAD.search(said), COMMENT.search(said)
        if head is not None and number is not None and f"autorl-hpc {jobs.uid} " in said:
            found[int(number[1])] = JobComment(job_id, int(number[1]), head[1])
    return [found[number] for number in sorted(found)]


def _queue(names: list[str]) -> list[str]:
    argv = ["squeue", "--noheader", "--states=all", f"--name={','.join(names)}", f"--format=%i{SEPARATOR}%k"]
    return run(argv).splitlines()


def _accounting(names: list[str]) -> list[str]:
    """Nothing where there is no accounting: then the queue alone knows, for some minutes."""
    argv = [
        *("sacct", "--noheader", "--allocations", "--allusers", "--parsable2", f"--delimiter={SEPARATOR}"),
        *("--starttime=now-365days", f"--name={','.join(names)}", "--format=JobID,Comment"),
    ]
    try:
        return run(argv).splitlines()
    except SchedulerError as error:
        log.info("sacct could not be asked: %s", error.what)
        return []
