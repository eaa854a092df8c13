"""Slurm's clients (sbatch, squeue, scancel, scontrol, sacct), our jobs in them, and an experiment's head in a job comment."""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autorl_hpc.cluster.vllm_program import ask
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.redact import without_secrets
from autorl_hpc.records.cluster import SeenJob, SlurmJobs
from autorl_hpc.records.exchange import SHORT_HEX
from autorl_hpc.states import Fault, job_state

SUBMIT_LIMIT_S = 60.0
TIMEOUT_S = 30.0  # a client waits 9 s for an absent controller (measured); a busy one may take longer
PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SCONTROL_", "SACCT_", "SINFO_", "SCANCEL_")
"""Variables that change what a client does or prints, or that come from a surrounding job."""

KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS")  # variables that say where the cluster is


class SchedulerError(AutorlError):
    """A client failed or is missing. `what` holds the scheduler's own words."""


def without_scheduler(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of a surrounding job and without output settings of Slurm's clients."""
    return {name: value for name, value in env.items() if not name.startswith(PREFIXES) or name in KEPT}


def available() -> bool:
    return all(shutil.which(name) is not None for name in ("sbatch", "squeue", "scancel", "scontrol"))


def run(argv: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> str:
    """Run a client and return what it prints. Raises SchedulerError if it is missing, failed, or did not answer in time."""
    env = {**without_scheduler(os.environ), "LC_ALL": "C", "SLURM_TIME_FORMAT": "%Y-%m-%dT%H:%M:%S"}
    answer = ask(argv, env=env, limit_s=timeout_s)
    if answer.missing:
        what = f"there is no {argv[0]} on this host"
        advice = "run this on a login node of the cluster, or use `--cluster local`"
        raise SchedulerError(what, fault=Fault.CLUSTER, next_step=advice, exit_code=Exit.ENVIRONMENT)
    if answer.code != 0:
        raise failed(argv[0], answer.err or answer.out)
    return answer.out


def sbatch(script: str, options: Sequence[str]) -> str:
    """Submit a script, and return what sbatch says beside the job's number. Raises SchedulerError: refused, or no answer."""
    env = without_secrets(without_scheduler(os.environ))
    env.pop("PYTHONPATH", None)
    answer = ask(["sbatch", "--parsable", *options], env={**env, "LC_ALL": "C"}, limit_s=SUBMIT_LIMIT_S, given=script)
    if answer.code != 0:
        words = re.sub(r"(?m)^(sbatch: (error: )?|allocation failure: )", "", answer.err or answer.out)
        raise failed("sbatch", words)
    return answer.err.strip()


def failed(client: str, words: str) -> SchedulerError:
    """Return an error with the scheduler's own words and advice."""
    lines = [line.strip() for line in words.strip().splitlines() if line.strip()]
    what = f"{client}: {' | '.join(lines)[:1000] or 'it failed without a word'}"
    advice = next((advice for part, advice in ADVICE if part in words.lower()), "see the scheduler's words")
    return SchedulerError(what, fault=Fault.CLUSTER, next_step=advice, exit_code=Exit.ENVIRONMENT)


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
    # Before a policy refusal, Slurm prints the limit that was hit in its own line.
    ("maxwall", "set `limits: {max_time: ...}` in the profile to MaxWall of your qos or account"),
    ("submitjob", "wait until some of your jobs have ended, or launch fewer runs at once"),
    ("maxjobs", "wait until some of your jobs have ended, or launch fewer runs at once"),
    ("maxgres", "ask for fewer GPUs a job: your qos or account has a limit"),
    ("pertres", "ask for fewer GPUs, CPUs or less memory a job: your qos or account has a limit"),
    ("job violates accounting/qos policy", "your account's limits forbid it: fewer jobs, shorter, or another qos"),
    ("unable to contact slurm controller", "the scheduler is down: the same command again, later"),
    ("socket timed out", "the scheduler is busy or down: the same command again, later"),
    ("establish a configuration source", "no slurm.conf here: go to a login node of the cluster, or set SLURM_CONF"),
)
"""Known messages of sbatch, and what helps."""


# --- our jobs in the scheduler, found by name, because Slurm may reuse job ids
#
# squeue with all states shows living jobs and, for some minutes, ended ones (MinJobAge); scontrol has the exit codes of the same
# jobs; sacct, if there is accounting, is used only for jobs that both have forgotten.

SEPARATOR = "\x1f"  # a character that no job name, comment or reason contains
FIELDS = ("%i", "%j", "%T", "%r", "%N", "%k", "%V")
COMMENT = re.compile(r"autorl-hpc \S+ number (\d+)")
_NO_ACCOUNTING = ("accounting storage is disabled", "there is no sacct")


def comment(uid: str, number: int) -> str:
    """Return the job comment that identifies one sbatch call among several with the same name."""
    return f"autorl-hpc {uid} number {number}"


def jobs(names: Iterable[str]) -> list[SeenJob]:
    """Return our jobs with these names, arrays task by task, the newest sbatch call last. Raises SchedulerError."""
    wanted, found = sorted(set(names)), []
    argv = ["squeue", "--noheader", "--array", "--states=all", f"--user={os.geteuid()}"]
    argv += [f"--name={','.join(wanted)}", f"--format={SEPARATOR.join(FIELDS)}"]
    for line in run(argv).splitlines() if wanted else ():
        parts = [part.strip() for part in line.split(SEPARATOR)]
        if len(parts) == len(FIELDS):
            job_id, name, state, reason, nodes, said, submitted = parts
            known = None if reason in ("", "None") else reason
            found.append(_seen(job_id, name, state, said, nodes, submitted, reason=known))
    return sorted(found, key=lambda job: (job.number or 0, job.index or 0, job.submitted_at or ""))


def _seen(job_id: str, name: str, state: str, said: str, nodes: str, submitted: str, **more: Any) -> SeenJob:
    number, task = COMMENT.search(said), re.fullmatch(r"\d+_(\d+)", job_id)
    return SeenJob(
        name=name,
        number=int(number[1]) if number else None,
        job_id=job_id,
        index=int(task[1]) if task else None,
        state=state,
        nodes=None if nodes in ("", "None assigned") else nodes,
        submitted_at=submitted or None,
        **more,
    )


def with_exit_codes(seen: Sequence[SeenJob], job_id: str) -> list[SeenJob]:
    """Return the jobs, with exit code and restarts for those with this id (for an array: all its tasks), by one scontrol call."""
    try:
        known = _by_scontrol(job_id)
    except SchedulerError:
        return list(seen)  # Slurm has forgotten it by now
    found = []
    for job in seen:
        words = known.get(job.job_id, {})
        update: dict[str, Any] = {}
        if words.get("JobName") == job.name:  # else the id was reused
            restarts, reason = words.get("Restarts", ""), words.get("Reason")
            update = {"exit_code": words.get("ExitCode"), "restarts": int(restarts) if restarts.isdigit() else 0}
            update["reason"] = job.reason if reason in (None, "None", "") else reason
        found.append(job.model_copy(update=update))
    return found


def _by_scontrol(job_id: str) -> dict[str, dict[str, str]]:
    text = run(["scontrol", "--oneliner", "show", "job", job_id.partition("_")[0]])
    known: dict[str, dict[str, str]] = {}
    for words in map(key_values, text.splitlines()):
        index = words.get("ArrayTaskId", "")
        known[f"{words['ArrayJobId']}_{index}" if index.isdigit() else words.get("JobId", "")] = words
    return known


def lives(job_id: str, name: str) -> bool:
    """Return whether scontrol shows this task, or those that wait with it, under this name and not over. Raises SchedulerError."""
    try:
        known = _by_scontrol(job_id)
    except SchedulerError as error:
        if "invalid job id" in error.what.lower():
            return False
        raise
    array, _, index = job_id.partition("_")
    waiting = known.get(array, {})
    spans = re.findall(r"(\d+)(?:-(\d+))?", waiting.get("ArrayTaskId", "").partition("%")[0])
    waits = any(int(first) <= int(index or 0) <= int(last or first) for first, last in spans)
    shown = known.get(job_id) or (waiting if waits else {})
    return shown.get("JobName") == name and not job_state(shown.get("JobState", "")).over


def key_values(line: str) -> dict[str, str]:
    """Parse the `Key=value` pairs of a scontrol line; a value ends where the next key begins."""
    pairs = re.finditer(r"(?:^|\s)([A-Za-z][\w:/&*]*)=(.*?)(?=\s[A-Za-z][\w:/&*]*=|$)", line)
    return {match[1]: match[2].strip() for match in pairs}


def accounting(names: Iterable[str]) -> list[SeenJob] | None:
    """Return our jobs by sacct, the last record of each; None without accounting or its database. Raises SchedulerError."""
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
        if len(parts) == 7 and "[" not in parts[0]:
            job_id, name, state, code, nodes, said, submitted = parts
            found[(job_id, name)] = _seen(job_id, name, state, said, nodes, submitted, exit_code=code or None)
    return list(found.values())


def alive(seen: Iterable[SeenJob]) -> list[SeenJob]:
    return [job for job in seen if not job_state(job.state).over]


def cancel(job_ids: Sequence[str]) -> None:
    """Cancel these jobs; those that have ended are no error. Raises SchedulerError: no answer."""
    try:
        if job_ids:
            run(["scancel", *job_ids])
    except SchedulerError as error:
        if "invalid job id" not in error.what.lower() and "already completing" not in error.what.lower():
            raise


def own_id() -> str | None:
    """Return the id of this process's job as squeue prints it; None outside of jobs."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def own_job() -> tuple[str, float | None] | None:
    """Return state and seconds left of this process's job; None if unknown. Without squeue, by the end time in a variable."""
    job_id, me = os.environ.get("SLURM_JOB_ID"), own_id()
    if job_id is None:
        return None
    try:
        # The last task of an array has the array's own id, by which squeue lists all tasks.
        text = run(["squeue", "--noheader", "--array", f"--jobs={job_id}", "--states=all", "--format=%i %T %L"])
    except SchedulerError:
        end = os.environ.get("SLURM_JOB_END_TIME", "")
        return ("RUNNING", int(end) - time.time()) if end.isdigit() else None
    rows = (line.split() for line in text.splitlines())
    return next(
        ((state, duration_s(left)) for name, state, left in (r for r in rows if len(r) == 3) if name == me), None
    )


def duration_s(text: str) -> float | None:
    """Parse Slurm's `[days-]hours:minutes:seconds`, `minutes:seconds` or `minutes` to seconds; None for UNLIMITED etc."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return None
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is None and len(parts) < 3:  # minutes[:seconds]
        parts.insert(0, 0)
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds)


# --- an experiment's head in the comment of its report job: Slurm's database is outside the account's files. The user can change
# the comment, so this is weaker than a head that someone else stores.

log = logging.getLogger("autorl_hpc.jobs")
HEAD = re.compile(rf" head ([0-9a-f]{{{SHORT_HEX}}})\b")


@dataclass(frozen=True)
class JobComment:
    """The head in a job's comment."""

    job_id: str
    number: int
    short: str


def tell(short: str) -> bool:
    """Write the short head into the comment of this process's job; False if that fails, on which nothing depends."""
    job_id = os.environ.get("SLURM_JOB_ID")
    if not job_id:
        return False
    try:
        said = run(["squeue", "--noheader", f"--jobs={job_id}", "--states=all", "--format=%k"]).strip()
        # Our jobs are identified by the existing comment, so it stays in front.
        run(["scontrol", "update", f"JobId={job_id}", f"Comment={HEAD.sub('', said)} head {short}"])
    except SchedulerError as error:
        log.warning("the head is not in the job's comment: %s", error.what)
        return False
    return True


def told(jobs: SlurmJobs) -> list[JobComment]:
    """Return the heads in the comments of an experiment's report jobs, the newest last. Raises SchedulerError."""
    names = ",".join(sorted({submitted.name for submitted in jobs.submitted if submitted.role == "report"}))
    if not names:
        return []
    sacct = ("sacct", "--noheader", "--allocations", "--allusers", "--parsable2", f"--delimiter={SEPARATOR}")
    lines = []
    try:
        lines += run([*sacct, "--starttime=now-365days", f"--name={names}", "--format=JobID,Comment"]).splitlines()
    except SchedulerError as error:  # without accounting only squeue knows the job, for some minutes
        log.info("sacct could not be asked: %s", error.what)
    squeue = ["squeue", "--noheader", "--states=all", f"--name={names}", f"--format=%i{SEPARATOR}%k"]
    lines += run(squeue).splitlines()  # its comment is newer
    found: dict[int, JobComment] = {}
    for line in lines:
        job_id, _, said = line.partition(SEPARATOR)
        head, number = HEAD.search(said), COMMENT.search(said)
        if head is not None and number is not None and f"autorl-hpc {jobs.uid} " in said:
            found[int(number[1])] = JobComment(job_id, int(number[1]), head[1])
    return [found[number] for number in sorted(found)]
