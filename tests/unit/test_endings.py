"""Why a run lost its job and whose fault that is: the table of docs/clusters.md, case by case."""

from __future__ import annotations

import os
from typing import Any

import pytest

from autorl_hpc.cluster.job_table import CLUSTER_WORDS, ListedJob, OrphanEnding, explain
from autorl_hpc.records.cluster import SeenJob, Submitted
from autorl_hpc.states import SLURM_STATES, EndedBy, Fault, JobState

STEPD_OOM = (
    "slurmstepd: error: Detected 1 oom_kill event in StepId=120.batch. Some of the step tasks have been OOM Killed."
)
OLD_OOM = (
    "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=120.batch cgroup. Some of your processes may have been "
    "killed by the cgroup out-of-memory handler."
)
GATHER_OOM = "slurmstepd: error: StepId=120.batch exceeded memory limit (300000000 > 268435456), being killed"
CUDA_OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def seen(state: str, exit_code: str | None = None, **fields: Any) -> ListedJob:
    job = SeenJob(name="n", number=2, job_id="120_0", index=0, state=state, exit_code=exit_code, **fields)
    return ListedJob(Submitted(name="n", role="agents", runs=("r0",), number=2, job_id="120"), "r0", job)


def gone(job_id: str | None = "120") -> ListedJob:
    return ListedJob(Submitted(name="n", role="agents", runs=("r0",), number=2, job_id=job_id), "r0", None)


AGENT_MEMORY = (EndedBy.OUT_OF_MEMORY, Fault.AGENT)
CLUSTER = (EndedBy.CRASHED, Fault.CLUSTER)
NOBODY = (EndedBy.CANCELLED, None)

CASES: list[tuple[str, ListedJob, bool, str | None, tuple[EndedBy, Fault | None], str]] = [
    # name, task, whether the agent began, the log's end, (ended by, fault), words of the reason
    ("memory, by its word", seen("OUT_OF_MEMORY", "0:125"), True, "", AGENT_MEMORY, "memory was used up"),
    ("memory, as FAILED 0:125", seen("FAILED", "0:125"), True, "", AGENT_MEMORY, "memory was used up"),
    ("memory, told by slurmstepd", seen("FAILED", "0:9"), True, f"a\n{STEPD_OOM}\n", AGENT_MEMORY, "memory"),
    ("memory, older words", seen("FAILED", "1:0"), True, OLD_OOM, AGENT_MEMORY, "memory"),
    ("memory, by polling", seen("FAILED", "0:9"), True, GATHER_OOM, AGENT_MEMORY, "memory"),
    ("memory, much older", seen("FAILED", "1:0"), True, "slurmstepd: error: Exceeded job memory limit", AGENT_MEMORY, "memory"),
    ("memory, before the agent", seen("OUT_OF_MEMORY", "0:125"), False, "", CLUSTER, "before the agent began"),
    ("a GPU's memory is another", seen("FAILED", "1:0"), True, CUDA_OOM, CLUSTER, "see its log"),
    ("memory words of an agent", seen("FAILED", "1:0"), True, "agent says: oom-kill!", CLUSTER, "see its log"),
    ("memory words, and a time limit", seen("TIMEOUT", "0:0"), True, STEPD_OOM, CLUSTER, "time limit"),
    ("time limit", seen("TIMEOUT", "0:0"), True, "", CLUSTER, "before the budget was used"),
    ("deadline", seen("DEADLINE", "0:0"), True, "", CLUSTER, "its deadline"),
    ("node", seen("NODE_FAIL", "1:0"), True, "", CLUSTER, "its node failed"),
    ("node, before the agent", seen("NODE_FAIL", "1:0"), False, None, CLUSTER, "its node failed"),
    ("boot", seen("BOOT_FAIL"), False, None, CLUSTER, "did not boot"),
    ("launch", seen("LAUNCH_FAILED"), False, None, CLUSTER, "could not start it"),
    ("configuration", seen("RECONFIG_FAIL"), True, "", CLUSTER, "reconfigured"),
    ("federation", seen("REVOKED"), False, None, CLUSTER, "another cluster"),
    ("preempted for good", seen("PREEMPTED", "0:15"), True, "", CLUSTER, "not put back in line"),
    ("credential, in the log", seen("FAILED", "1:0"), False, "srun: error: Job credential revoked", CLUSTER, "earlier attempt"),
    ("credential, an agent's words", seen("FAILED", "1:0"), True, "Job credential revoked", CLUSTER, "see its log"),
    ("credential, as the reason", seen("FAILED", "1:0", reason="Job credential revoked"), False, None, CLUSTER, "earlier"),
    ("never ran", seen("FAILED", "0:53"), False, None, CLUSTER, "it never ran"),
    ("a second attempt never ran", seen("FAILED", "0:53"), True, "of the first", CLUSTER, "it never ran"),
    ("no log, whatever the code", seen("FAILED", "1:0"), False, None, CLUSTER, "it never ran"),
    ("last link, time over", seen("FAILED", "75:0"), True, "", CLUSTER, "it was the last link"),
    ("command not found", seen("FAILED", "127:0"), False, "bash: python: not found", CLUSTER, "set-up lines"),
    ("command not to be run", seen("FAILED", "126:0"), False, "Permission denied", CLUSTER, "set-up lines"),
    ("killed by hand", seen("FAILED", "0:9"), True, "", CLUSTER, "killed, by the node's kernel or by hand"),
    ("another code", seen("FAILED", "3:0", nodes="gpu07"), True, "", CLUSTER, "on gpu07; see its log"),
    ("another code, before the agent", seen("FAILED", "3:0"), False, "words", CLUSTER, "before the agent began"),
    ("no code known", seen("FAILED"), True, "", CLUSTER, "ended FAILED; see its log"),
    ("done, but not sealed", seen("COMPLETED", "0:0"), True, "", CLUSTER, "no job is left"),
    ("scancel", seen("CANCELLED", "0:15"), True, "", NOBODY, "cancelled by scancel"),
    ("scancel, by accounting", seen("CANCELLED by 1001", "0:15"), True, "", NOBODY, "cancelled by scancel"),
    ("scancel, cut off", seen("CANCELLED+"), False, None, NOBODY, "cancelled by scancel"),
    ("scancel of a run out of memory", seen("CANCELLED", "0:125"), True, STEPD_OOM, NOBODY, "cancelled by scancel"),
    ("waits for ever", seen("CANCELLED", reason="DependencyNeverSatisfied"), False, None, CLUSTER, "can't come any more"),
    ("by the administrators", seen("CANCELLED by 0", "0:15"), True, "", CLUSTER, "the administrators"),
    ("gone", gone(), True, None, CLUSTER, "doesn't know job 120 any more"),
    ("gone, never numbered", gone(None), False, None, CLUSTER, "job that was never numbered"),
    ("more than one word", seen("NODE_FAIL,COMPLETING"), True, "", CLUSTER, "its node failed"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("task", "began", "log", "expected", "words"), [case[1:] for case in CASES], ids=[c[0] for c in CASES]
)
def test_the_table(
    monkeypatch: pytest.MonkeyPatch,
    task: ListedJob,
    began: bool,
    log: str | None,
    expected: tuple[EndedBy, Fault | None],
    words: str,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1001)
    ending = explain(task, began=began, log_tail=log)
    assert (ending.ended_by, ending.fault) == expected, ending.reason
    assert words in ending.reason
    assert "\n" not in ending.reason
    if task.seen is not None:
        assert f"job 120_0 ended {task.seen.state}" in ending.reason, "Slurm's own word stands beside ours"


def test_roots_own_scancel_is_no_administrators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    ending = explain(seen("CANCELLED by 0"), began=True, log_tail="")
    assert ending == OrphanEnding(EndedBy.CANCELLED, None, "job 120_0 ended CANCELLED by 0: cancelled by scancel")


def test_every_bad_end_of_slurm_has_a_line_of_its_own() -> None:
    """FAILED, CANCELLED and OUT_OF_MEMORY are looked at more closely; all others are in the table of words."""
    bad = {word for word, state in SLURM_STATES.items() if state is JobState.ENDED}
    assert bad - set(CLUSTER_WORDS) == {"FAILED", "CANCELLED", "OUT_OF_MEMORY"}
    assert set(CLUSTER_WORDS) <= bad


def test_an_agent_is_blamed_for_nothing_but_its_memory() -> None:
    blamed = [case[0] for case in CASES if case[4][1] is Fault.AGENT]
    assert all(name.startswith("memory") for name in blamed)
    assert not any(case[4][1] is Fault.AGENT for case in CASES if not case[2]), (
        "one that never began is blamed for nothing"
    )


def test_memory_that_agent_and_grader_shared_is_nobodys_fault_but_the_clusters() -> None:
    ending = explain(seen("OUT_OF_MEMORY"), began=True, log_tail="", shared=True)
    assert (ending.ended_by, ending.fault) == CLUSTER and "shared" in ending.reason
