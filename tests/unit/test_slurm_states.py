"""Slurm's words for the state of a job, and ours."""

from __future__ import annotations

import pytest

from autorl_hpc.states import SLURM_STATES, JobState, job_state

WAITING, RUNNING, HELD = JobState.WAITING, JobState.RUNNING, JobState.HELD
DONE, ENDED = JobState.DONE, JobState.ENDED

SQUEUE = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_FED"), WAITING),
    **dict.fromkeys(("COMPLETING", "CONFIGURING", "RESIZING", "RUNNING", "SIGNALING"), RUNNING),
    **dict.fromkeys(("STAGE_OUT", "STOPPED", "SUSPENDED"), RUNNING),
    **dict.fromkeys(("REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"), HELD),
    **dict.fromkeys(("BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"), ENDED),
    **dict.fromkeys(("PREEMPTED", "REVOKED", "TIMEOUT"), ENDED),
    "COMPLETED": DONE,
}
"""The section "job state codes" of squeue's manual."""

NEWER = {"EXPEDITING": WAITING, "POWER_UP_NODE": RUNNING, "UPDATE_DB": RUNNING}
NEWER |= {"LAUNCH_FAILED": ENDED, "RECONFIG_FAIL": ENDED}
"""What versions since 23.11 add."""


@pytest.mark.parametrize(("word", "state"), {**SQUEUE, **NEWER}.items())
def test_every_word_of_the_manuals_has_its_state(word: str, state: JobState) -> None:
    assert job_state(word) is state
    assert job_state(word.lower()) is state, "older clients print some words in lower case"


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED by 1001", ENDED),
        ("CANCELLED by 0", ENDED),
        ("CANCELLED+", ENDED),
        ("OUT_OF_ME+", JobState.UNKNOWN),  # cut off: only sacct without --parsable2 prints it, which is never asked
        ("NODE_FAIL+", ENDED),
        ("RUNNING,COMPLETING", RUNNING),
        ("PENDING,REQUEUED", WAITING),
        ("NODE_FAIL,REQUEUED", WAITING),  # Slurm starts it again: it is not over
        ("COMPLETED,REQUEUED", WAITING),
        (" RUNNING ", RUNNING),
    ],
)
def test_words_that_carry_more(text: str, state: JobState) -> None:
    assert job_state(text) is state


@pytest.mark.parametrize("text", ["HIBERNATING", "PD", "", " ", "+", ",", "by 1001", "0"])
def test_an_unknown_word_counts_as_alive(text: str) -> None:
    assert job_state(text) is JobState.UNKNOWN
    assert not job_state(text).over


def test_what_is_over() -> None:
    assert set(SLURM_STATES) == set(SQUEUE) | set(NEWER)
    over = {state for state in JobState if state.over}
    assert over == {JobState.DONE, JobState.ENDED, JobState.GONE}
    assert {word for word, state in SQUEUE.items() if state.over} == {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
        *("REVOKED", "TIMEOUT"),
    }
