"""The table of an experiment's Slurm jobs, why one ended, and the files slurm.json (submitted) and seen.json (watched)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autorl_hpc.files import atomic, reading
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.cluster import SeenJob, SeenJobs, SlurmJobs, Submitted
from autorl_hpc.states import EXIT_RESUME, EndedBy, Fault, JobState, job_state

SUBMITTED_NAME = "slurm.json"
SEEN_NAME = "seen.json"


def read_submitted(experiment: ExperimentDir) -> SlurmJobs | None:
    """Read slurm.json; None before the first launch. Raises AutorlError: it is damaged; OSError: it can't be read."""
    # Not in jobs/, which users may delete: the watcher must still know its jobs.
    path = experiment.path / SUBMITTED_NAME
    if SUBMITTED_NAME not in reading.list_names(experiment.path):
        return None
    return parse_record(SlurmJobs, reading.read_json(path), path)


def write_submitted(experiment: ExperimentDir, jobs: SlurmJobs) -> None:
    atomic.write_json(experiment.path / SUBMITTED_NAME, jobs.model_dump(mode="json"))


def read_seen(experiment: ExperimentDir) -> SeenJobs:
    """Read what the watcher last saw; empty if it never looked or the file can't be read now."""
    path = experiment.path / SEEN_NAME
    value = reading.read_json_or_none(path)
    return SeenJobs(counter=0) if value is None else parse_record(SeenJobs, value, path)


def write_seen(experiment: ExperimentDir, seen: SeenJobs) -> None:
    atomic.write_bytes(experiment.path / SEEN_NAME, seen.canonical() + b"\n")


@dataclass(frozen=True)
class ListedJob:
    """One job of ours, or one task of an array; `seen` is None if the scheduler does not know it."""

    submitted: Submitted
    run_id: str | None
    seen: SeenJob | None

    @property
    def state(self) -> JobState:
        return JobState.GONE if self.seen is None else job_state(self.seen.state)


@dataclass
class JobTable:
    """Every job of an experiment that was submitted and not taken back."""

    tasks: list[ListedJob] = field(default_factory=list)

    @classmethod
    def of(cls, jobs: SlurmJobs, seen: Iterable[SeenJob], *, asked_back: bool = False) -> JobTable:
        """Match jobs by name, since Slurm may reuse ids; with `asked_back` also those that a failed launch takes back."""
        by_name: dict[str, list[SeenJob]] = {}
        for job in seen:
            by_name.setdefault(job.name, []).append(job)
        board = cls()
        for submitted in jobs.submitted:
            if submitted.taken_back or (submitted.asked_back and not asked_back):
                continue
            mine = [job for job in by_name.get(submitted.name, []) if _is_of(job, submitted)]
            if not submitted.runs:
                board.tasks.append(ListedJob(submitted, None, mine[-1] if mine else None))
                continue
            by_index = {job.index: job for job in mine}
            for index, run_id in enumerate(submitted.runs):
                board.tasks.append(ListedJob(submitted, run_id, by_index.get(index)))
        return board

    def of_run(self, run_id: str) -> list[ListedJob]:
        return [task for task in self.tasks if task.run_id == run_id]

    def alive(self, role: str | None = None) -> list[ListedJob]:
        """Return the tasks that run or wait, of all roles or of one."""
        return [task for task in self.tasks if not task.state.over and role in (None, task.submitted.role)]

    def alive_runs(self) -> set[str]:
        return {task.run_id for task in self.alive() if task.run_id is not None}


def _is_of(job: SeenJob, submitted: Submitted) -> bool:
    """Return whether the job belongs to this sbatch call. Links of a chain share a name but not the number or id."""
    if job.number is not None:
        return job.number == submitted.number
    return submitted.job_id is None or job.job_id.partition("_")[0] == submitted.job_id


def names_of(jobs: SlurmJobs) -> Sequence[str]:
    return sorted({submitted.name for submitted in jobs.submitted if not submitted.taken_back})


# --- why a run lost its job, and whose fault that is. Measured on Slurm 22.05; docs/clusters.md has the table.

LOG_TAIL_BYTES = 8192
OOM = ("oom-kill", "oom_kill", "out of memory", "out-of-memory")
# What slurmstepd writes into the job's log when memory runs out, even if the state is FAILED.
MEMORY_WORDS = ("exceeded memory limit", "exceeded job memory limit", "exceeded step memory limit", *OOM)
SLURM_SPEAKS = ("slurmstepd", "srun:", "slurmd")  # Slurm's own lines; a grader's "CUDA out of memory" doesn't count

CREDENTIAL = "job credential revoked"
CLUSTER_WORDS = {
    "NODE_FAIL": "its node failed",
    "BOOT_FAIL": "its node did not boot",
    "LAUNCH_FAILED": "the scheduler could not start it",
    "RECONFIG_FAIL": "its node could not be reconfigured",
    "REVOKED": "another cluster of the federation took it",
    "PREEMPTED": "it was preempted and not put back in line",
    "TIMEOUT": "it reached its time limit before the budget was used, and no other link of the chain was left",
    "DEADLINE": "it reached its deadline",
}


@dataclass(frozen=True)
class OrphanEnding:
    """Why an orphaned run ended, for its seal. `again`: another job may get further."""

    ended_by: EndedBy
    fault: Fault | None
    reason: str
    again: bool = False


def explain(task: ListedJob, *, began: bool, log_tail: str | None, shared: bool = False) -> OrphanEnding:
    """Return why the last job of an unsealed run ended. `began`: a supervisor of the run wrote an entry; `log_tail`:
    the end of the job's log; None if there is none; `shared`: it shared its memory with a grader."""
    seen = task.seen
    if seen is None or task.state is JobState.GONE:
        number = task.submitted.job_id or "that was never numbered"
        return _cluster(
            f"the scheduler doesn't know job {number} any more: it lost it, or it ended long ago unseen", True
        )
    word = (seen.state.replace("+", " ").replace(",", " ").split() or [""])[0].upper()
    code, _, by_signal = (seen.exit_code or "").partition(":")
    log = (log_tail or "").lower()
    told = "" if seen.exit_code in (None, "0:0") else f" {seen.exit_code}"
    what = f"job {seen.job_id} ended {seen.state}{told}"
    if word == "CANCELLED":
        if seen.reason == "DependencyNeverSatisfied":
            return _cluster(f"{what}: what it waited for can't come any more")
        if seen.state.rstrip().endswith(" by 0") and os.geteuid() != 0:
            return _cluster(f"{what}: the administrators cancelled it")
        return OrphanEnding(EndedBy.CANCELLED, None, f"{what}: cancelled by scancel")
    of_slurm = "\n".join(line for line in log.splitlines() if line.strip().startswith(SLURM_SPEAKS))
    out_of_memory = by_signal == "125" or any(words in of_slurm for words in MEMORY_WORDS)
    if word == "OUT_OF_MEMORY" or (word == "FAILED" and out_of_memory):
        reason = f"{what}: the job's memory was used up"
        if shared:
            return _cluster(f"{reason}, which agent and grader shared")
        if not began:
            return _cluster(f"{reason} before the agent began")
        return OrphanEnding(EndedBy.OUT_OF_MEMORY, Fault.AGENT, reason)
    if CREDENTIAL in of_slurm or CREDENTIAL in (seen.reason or "").lower():
        return _cluster(f"{what}: the node was still ending an earlier attempt (job credential revoked)", True)
    if word in CLUSTER_WORDS:
        return _cluster(f"{what}: {CLUSTER_WORDS[word]}", word != "DEADLINE")
    if task.state is JobState.DONE:
        return _cluster(f"{what}, and no job is left that could go on with the run", True)
    if by_signal == "53" or (log_tail is None and not began):
        return _cluster(f"{what}: it never ran; its folder or its log could not be opened on the node", True)
    if code == str(EXIT_RESUME):
        return _cluster(f"{what}: the time limit came before the budget was used, and it was the last link", True)
    if code in ("126", "127"):
        return _cluster(f"{what}: a command of the job was not found; see its log and the profile's set-up lines")
    if by_signal == "9":
        return _cluster(f"{what}: everything in it was killed, by the node's kernel or by hand", True)
    node = f" on {seen.nodes}" if seen.nodes else ""
    return _cluster(f"{what}{node}{'' if began else ' before the agent began'}; see its log")


def _cluster(reason: str, again: bool = False) -> OrphanEnding:
    return OrphanEnding(EndedBy.CRASHED, Fault.CLUSTER, reason, again)
