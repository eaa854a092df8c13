"""What squeue tells of our jobs, and which job stands for which run."""

from __future__ import annotations

import os

import ourjobs
import pytest
from fakes import US, Clients, lines, squeue_line
from ourjobs import AGENTS, GRADER, UID

from autorl_hpc.cluster import slurm
from autorl_hpc.cluster.job_table import JobTable, names_of
from autorl_hpc.records.cluster import SlurmJobs, Submitted
from autorl_hpc.states import JobState

clients = ourjobs.clients


def submitted(*jobs: Submitted) -> SlurmJobs:
    return SlurmJobs(uid=UID, cluster="there", submitted=jobs)


def array(number: int = 2, job_id: str = "120", runs: tuple[str, ...] = ("a", "b", "c")) -> Submitted:
    return Submitted(name=f"exp.agents-{number}.{UID}", role="agents", runs=runs, number=number, job_id=job_id)


# squeue


def test_an_array_is_told_task_by_task(clients: Clients) -> None:
    clients.says(
        "squeue",
        lines(
            [
                squeue_line("120_2", AGENTS, "PENDING", 2, reason="JobArrayTaskLimit"),
                squeue_line("120_0", AGENTS, "COMPLETED", 2, nodes="gpu01"),
                squeue_line("120_1", AGENTS, "RUNNING", 2, nodes="gpu02"),
                squeue_line("119", GRADER, "RUNNING", 1, nodes="gpu03", at="T0"),
            ]
        ),
    )
    seen = slurm.jobs([AGENTS, GRADER])
    assert [(job.job_id, job.index, job.number) for job in seen] == [
        ("119", None, 1),
        ("120_0", 0, 2),
        ("120_1", 1, 2),
        ("120_2", 2, 2),
    ]
    first, waiting = seen[1], seen[3]
    assert (first.nodes, first.reason, first.submitted_at) == ("gpu01", None, "T1")
    assert (waiting.nodes, waiting.reason, waiting.state) == (None, "JobArrayTaskLimit", "PENDING")


def test_it_asks_for_our_names_in_all_states_task_by_task(clients: Clients) -> None:
    clients.says("squeue")
    slurm.jobs([GRADER, AGENTS, AGENTS])
    (call,) = clients.calls("squeue")
    assert {"--array", "--states=all", f"--user={os.geteuid()}", f"--name={AGENTS},{GRADER}"} <= set(call)


def test_no_names_ask_nothing_and_names_without_jobs_find_nothing(clients: Clients) -> None:
    clients.says("squeue")
    assert slurm.jobs([]) == []
    assert clients.calls("squeue") == []
    assert slurm.jobs([AGENTS]) == []
    assert len(clients.calls("squeue")) == 1


def test_many_names_are_asked_for_in_parts(clients: Clients) -> None:
    clients.says("squeue", lines([squeue_line("5", GRADER, "RUNNING", 1)]))
    found = slurm.jobs([f"exp.agents-{n}.{UID}" for n in range(slurm.PER_CALL + 1)])
    assert len(clients.calls("squeue")) == 2
    assert len(found) == 2, "what each part found"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "slurm_load_jobs: warning: something",
        "120 exp RUNNING",
        US.join(["1", "2", "3"]),
        squeue_line("1", GRADER, "RUNNING", 1) + US + "more",
        "\N{REPLACEMENT CHARACTER}\x00",
    ],
    ids=["empty", "words", "spaces", "too few", "too many", "bytes"],
)
def test_a_line_of_another_form_is_passed_over(clients: Clients, line: str) -> None:
    clients.says("squeue", lines([line, squeue_line("7", GRADER, "RUNNING", 1), line]))
    assert [job.job_id for job in slurm.jobs([GRADER])] == ["7"]


def test_bytes_that_are_no_text_harm_nothing(clients: Clients) -> None:
    row = squeue_line("7", GRADER, "RUNNING", 1)
    clients.script("squeue", r"printf '\377\376\n'", f"printf '%s\\n' '{row}'")
    assert [job.job_id for job in slurm.jobs([GRADER])] == ["7"]


@pytest.mark.parametrize(
    ("comment", "number"),
    [
        (slurm.comment(UID, 12), 12),
        ("(null)", None),
        ("", None),
        ("a site's own words", None),
        (f"site: x; {slurm.comment(UID, 3)}", 3),
        ("autorl-hpc number 4", None),
    ],
)
def test_the_comment_tells_which_call_it_was(clients: Clients, comment: str, number: int | None) -> None:
    clients.says("squeue", lines([US.join(["7", GRADER, "RUNNING", "None", "", comment, "T1"])]))
    assert slurm.jobs([GRADER])[0].number == number


# which job stands for which run


def test_links_of_one_name_are_told_apart_by_the_comment(clients: Clients) -> None:
    clients.says(
        "squeue",
        lines([squeue_line("9", GRADER, "PENDING", 4), squeue_line("7", GRADER, "COMPLETED", 1)]),
    )
    jobs = submitted(
        Submitted(name=GRADER, role="grader-0", number=1, job_id="7", last_link=False),
        Submitted(name=GRADER, role="grader-0", number=4, job_id="9", link=2),
    )
    board = JobTable.of(jobs, slurm.jobs(names_of(jobs)))
    assert [(task.submitted.number, task.state) for task in board.tasks] == [(1, JobState.DONE), (4, JobState.WAITING)]
    assert [task.submitted.number for task in board.alive("grader-0")] == [4]


def test_without_comments_the_numbers_of_jobs_tell(clients: Clients) -> None:
    clients.says("squeue", lines([squeue_line("9", GRADER, "RUNNING"), squeue_line("7", GRADER, "FAILED")]))
    jobs = submitted(
        Submitted(name=GRADER, role="grader-0", number=1, job_id="7"),
        Submitted(name=GRADER, role="grader-0", number=4, job_id="9"),
    )
    board = JobTable.of(jobs, slurm.jobs(names_of(jobs)))
    assert [task.state for task in board.tasks] == [JobState.ENDED, JobState.RUNNING]


def test_a_number_that_was_given_out_twice_is_not_taken_for_ours(clients: Clients) -> None:
    """After a lost state, job 120 is another array of ours; what call 2 submitted is gone."""
    other = f"exp.agents-5.{UID}"
    clients.says(
        "squeue", lines([squeue_line("120_0", other, "RUNNING", 5), squeue_line("120_1", other, "RUNNING", 5)])
    )
    jobs = submitted(array(2, "120", ("a", "b")), array(5, "120", ("c", "d")))
    board = JobTable.of(jobs, slurm.jobs(names_of(jobs)))
    assert {task.run_id: task.state for task in board.tasks} == {
        "a": JobState.GONE,
        "b": JobState.GONE,
        "c": JobState.RUNNING,
        "d": JobState.RUNNING,
    }
    assert board.alive_runs() == {"c", "d"}


def test_what_was_taken_back_counts_for_nothing() -> None:
    jobs = submitted(array().model_copy(update={"taken_back": True}))
    assert JobTable.of(jobs, []).tasks == []
    assert names_of(jobs) == []


def test_a_run_of_two_links_lives_while_one_of_them_may_come(clients: Clients) -> None:
    second = f"exp.agents-3.{UID}"
    clients.says(
        "squeue",
        lines(
            [
                squeue_line("120_0", AGENTS, "COMPLETED", 2),
                squeue_line("120_1", AGENTS, "FAILED", 2),
                squeue_line("121_0", second, "PENDING", 3, reason="Dependency"),
                squeue_line("121_1", second, "CANCELLED", 3),
            ]
        ),
    )
    jobs = submitted(array(2, "120", ("a", "b")), array(3, "121", ("a", "b")))
    board = JobTable.of(jobs, slurm.jobs(names_of(jobs)))
    assert board.alive_runs() == {"a"}
    assert [task.submitted.number for task in board.of_run("b")] == [2, 3]
