"""What scontrol and sacct tell of jobs that have ended."""

from __future__ import annotations

from pathlib import Path

import ourjobs
import pytest
from fakes import US, Clients, lines, squeue_line
from ourjobs import AGENTS, GRADER, UID

from autorl_hpc.cluster import slurm
from autorl_hpc.cluster.slurm import SchedulerError

clients = ourjobs.clients


# scontrol


def scontrol_line(job: str, name: str, **words: str) -> str:
    base = {"JobId": job, "JobName": name, "UserId": "me(1001)", "JobState": "FAILED", **words}
    return " ".join(f"{key}={value}" for key, value in base.items())


def test_exit_codes_come_from_scontrol_task_by_task(clients: Clients) -> None:
    clients.says(
        "squeue", lines([squeue_line("120_0", AGENTS, "FAILED", 2), squeue_line("120_1", AGENTS, "COMPLETED", 2)])
    )
    clients.says(
        "scontrol",
        lines(
            [
                scontrol_line(
                    "121",
                    AGENTS,
                    ArrayJobId="120",
                    ArrayTaskId="1",
                    Reason="None",
                    Restarts="0",
                    ExitCode="0:0",
                    Comment=slurm.comment(UID, 2),
                ),
                scontrol_line(
                    "120",
                    AGENTS,
                    ArrayJobId="120",
                    ArrayTaskId="0",
                    Reason="NonZeroExitCode",
                    Restarts="2",
                    ExitCode="75:0",
                    Command="/shared/a folder/with spaces.sh",
                ),
            ]
        ),
    )
    first, second = slurm.with_exit_codes(slurm.jobs([AGENTS]), "120_0")
    assert (first.exit_code, first.restarts, first.reason) == ("75:0", 2, "NonZeroExitCode")
    assert (second.exit_code, second.restarts, second.reason) == ("0:0", 0, None)
    assert clients.calls("scontrol") == [["--oneliner", "show", "job", "120"]]


def test_another_jobs_exit_code_is_not_taken(clients: Clients) -> None:
    clients.says("squeue", lines([squeue_line("7", GRADER, "FAILED", 1)]))
    clients.says("scontrol", lines([scontrol_line("7", "somebody-elses", ExitCode="1:0")]))
    assert slurm.with_exit_codes(slurm.jobs([GRADER]), "7")[0].exit_code is None


def test_jobs_that_scontrol_has_forgotten_stay_as_they_were(clients: Clients) -> None:
    clients.says("squeue", lines([squeue_line("7", GRADER, "FAILED", 1)]))
    clients.says("scontrol", error="slurm_load_jobs error: Invalid job id specified\n", code=1)
    seen = slurm.jobs([GRADER])
    assert slurm.with_exit_codes(seen, "7") == seen


# sacct


def sacct_line(job: str, name: str, state: str, code: str = "0:0", nodes: str = "gpu01", number: int | None = 2) -> str:
    return US.join([job, name, state, code, nodes, "" if number is None else slurm.comment(UID, number), "T1"])


def test_accounting_tells_of_forgotten_jobs_and_the_last_record_stands(clients: Clients) -> None:
    clients.says(
        "sacct",
        lines(
            [
                sacct_line("120_0", AGENTS, "NODE_FAIL", "1:0"),
                sacct_line("120_0", AGENTS, "CANCELLED by 1001", "0:15"),
                sacct_line("120_1", AGENTS, "FAILED", "0:53", nodes="None assigned", number=None),
                sacct_line("120_[2-9%2]", AGENTS, "PENDING", nodes=""),
                "sacct: warning: words",
            ]
        ),
    )
    told = slurm.accounting([AGENTS])
    assert told is not None
    assert [(job.job_id, job.index, job.state, job.exit_code, job.nodes, job.number) for job in told] == [
        ("120_0", 0, "CANCELLED by 1001", "0:15", "gpu01", 2),
        ("120_1", 1, "FAILED", "0:53", None, None),
    ]


def test_no_accounting_is_no_error(clients: Clients) -> None:
    clients.says("sacct", error="Slurm accounting storage is disabled\n", code=1)
    assert slurm.accounting([AGENTS]) is None


def test_a_database_that_is_down_is_not_taken_for_none(clients: Clients) -> None:
    words = (
        "sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection to host:localhost:6819: "
        "Connection refused\nsacct: error: Problem talking to the database: Connection refused\n"
    )
    clients.says("sacct", error=words, code=1)
    with pytest.raises(SchedulerError, match="Problem talking to the database"):
        slurm.accounting([AGENTS])


def test_a_host_without_sacct_has_no_accounting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Clients(tmp_path, monkeypatch, alone=True)
    assert slurm.accounting([AGENTS]) is None


def test_another_failure_of_sacct_is_one(clients: Clients) -> None:
    clients.says("sacct", error="sacct: error: Invalid user id: x\n", code=1)
    with pytest.raises(SchedulerError, match="Invalid user id"):
        slurm.accounting([AGENTS])
