"""Why a run lost its job, and whose fault that is: Slurm's words, their disguises, and jobs that left no word at all.

Measured on Slurm 22.05; see docs/clusters.md for the table.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from autorl_hpc.cluster.board import Task
from autorl_hpc.states import EXIT_RESUME, EndedBy, Fault, JobState

LOG_TAIL_BYTES = 8192
MEMORY_WORDS = (
    *("exceeded memory limit", "exceeded job memory limit", "exceeded step memory limit"),
    *("oom-kill", "oom_kill", "out of memory", "out-of-memory"),
)
"""What slurmstepd writes into the job's log when the memory ran out, while the state may say FAILED."""

SLURM_SPEAKS = ("slurmstepd", "srun:", "slurmd")
"""How lines of Slurm itself begin: "CUDA out of memory" of a grader in the same job is another matter."""

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
class Ending:
    """What the seal of an orphan says."""

    ended_by: EndedBy
    fault: Fault | None
    reason: str


def explain(task: Task, *, began: bool, log_tail: str | None, shared: bool = False) -> Ending:
    """Why the last job of an unsealed run ended.

    Args:
        began: whether a supervisor of the run ever made an entry.
        log_tail: the end of the job's log; None: there is no log.
        shared: a grader had its part of the job's memory.
    """
    seen = task.seen
    if seen is None or task.state is JobState.GONE:
        number = task.submitted.job_id or "that was never numbered"
        return _cluster(f"the scheduler doesn't know job {number} any more: it lost it, or it ended long ago unseen")
    word = (seen.state.replace("+", " ").replace(",", " ").split() or [""])[0].upper()
    code, _, by_signal = (seen.exit_code or "").partition(":")
    log = (log_tail or "").lower()
    told = "" if seen.exit_code in (None, "0:0") else f" {seen.exit_code}"
    what = f"job {seen.job_id} ended {seen.state}{told}"
    if word == "CANCELLED":
        return _cancelled(what, seen.state, seen.reason)
    out_of_memory = word == "OUT_OF_MEMORY" or (word == "FAILED" and (by_signal == "125" or _mentions_memory(log)))
    if out_of_memory:
        reason = f"{what}: the job's memory was used up"
        if shared:
            return _cluster(f"{reason}, which agent and grader shared")
        return (
            Ending(EndedBy.OUT_OF_MEMORY, Fault.AGENT, reason)
            if began
            else _cluster(f"{reason} before the agent began")
        )
    if CREDENTIAL in log or CREDENTIAL in (seen.reason or "").lower():
        return _cluster(f"{what}: the node was still ending an earlier attempt (job credential revoked)")
    if word in CLUSTER_WORDS:
        return _cluster(f"{what}: {CLUSTER_WORDS[word]}")
    if task.state is JobState.DONE:
        return _cluster(f"{what}, and no job is left that could go on with the run")
    if by_signal == "53" or (log_tail is None and not began):
        return _cluster(f"{what}: it never ran; its folder or its log could not be opened on the node")
    if code == str(EXIT_RESUME):
        return _cluster(f"{what}: the time limit came before the budget was used, and it was the last link")
    if code in ("126", "127"):
        return _cluster(f"{what}: a command of the job was not found; see its log and the profile's set-up lines")
    if by_signal == "9":
        return _cluster(f"{what}: everything in it was killed, by the node's kernel or by hand")
    node = f" on {seen.nodes}" if seen.nodes else ""
    return _cluster(f"{what}{node}; see its log" if began else f"{what}{node} before the agent began; see its log")


def _cancelled(what: str, word: str, reason: str | None) -> Ending:
    if reason == "DependencyNeverSatisfied":
        return _cluster(f"{what}: what it waited for can't come any more")
    if word.rstrip().endswith(" by 0") and os.geteuid() != 0:
        return _cluster(f"{what}: the administrators cancelled it")
    return Ending(EndedBy.CANCELLED, None, f"{what}: cancelled by scancel")


def _mentions_memory(log: str) -> bool:
    lines = [line.strip() for line in log.splitlines()]
    return any(words in line for line in lines if line.startswith(SLURM_SPEAKS) for words in MEMORY_WORDS)


def _cluster(reason: str) -> Ending:
    return Ending(EndedBy.CRASHED, Fault.CLUSTER, reason)
