"""What Slurm's clients tell of our jobs, by recorded output; clients that fail, refuse or hang."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fakes import US, Clients, lines, squeue_line

from autorl_hpc.cluster import slurm
from autorl_hpc.cluster.job_table import JobTable, names_of
from autorl_hpc.cluster.slurm import SchedulerError
from autorl_hpc.errors import Exit
from autorl_hpc.records.cluster import SlurmJobs, Submitted
from autorl_hpc.states import Fault, JobState

UID = "0123456789ab"
AGENTS, GRADER = f"exp.agents-2.{UID}", f"exp.grader-0.{UID}"


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clients:
    return Clients(tmp_path, monkeypatch)


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


# which job stands for which run


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
    back = submitted(array(2, "120", ("a", "b")), array(3, "121", ("a", "b")).model_copy(update={"taken_back": True}))
    assert JobTable.of(back, slurm.jobs(names_of(back))).alive_runs() == set(), (
        "a launch that failed took these jobs back"
    )
    chain = submitted(*(Submitted(name=GRADER, role="grader-0", number=n, job_id=str(118 + n)) for n in (1, 4)))
    clients.says(
        "squeue", lines([squeue_line("119", GRADER, "COMPLETED", 1), squeue_line("122", GRADER, "PENDING", 4)])
    )
    states = [task.state for task in JobTable.of(chain, slurm.jobs(names_of(chain))).tasks]
    assert states == [JobState.DONE, JobState.WAITING], "links of a chain share a name and not a number"


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


def test_no_accounting_is_no_error_and_a_database_that_is_down_is_one(clients: Clients) -> None:
    clients.says("sacct", error="Slurm accounting storage is disabled\n", code=1)
    assert slurm.accounting([AGENTS]) is None
    clients.says("sacct", error="sacct: error: Problem talking to the database: Connection refused\n", code=1)
    with pytest.raises(SchedulerError, match="Problem talking to the database"):
        slurm.accounting([AGENTS])


# clients that fail

DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"


def test_a_controller_that_is_down_is_said_in_its_words(clients: Clients) -> None:
    clients.says("squeue", error=DOWN, code=1)
    with pytest.raises(SchedulerError) as caught:
        slurm.jobs([AGENTS])
    error = caught.value
    assert error.what == "squeue: slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    assert error.fault is Fault.CLUSTER and error.exit_code is Exit.ENVIRONMENT
    assert error.next_step is not None and "the same command again" in error.next_step


def test_a_client_that_hangs_is_given_up(clients: Clients) -> None:
    clients.script("squeue", "exec sleep 300")
    before = time.monotonic()
    with pytest.raises(SchedulerError, match=r"squeue: no answer within 0 s"):
        slurm.run(["squeue"], timeout_s=0.3)
    assert time.monotonic() - before < 60


REFUSALS = [
    ("Invalid account or account/partition combination specified", "`account`"),
    ("invalid partition specified: gpux\nInvalid partition name specified", "`partition`"),
    ("Invalid qos specification", "`qos`"),
    ("Requested node configuration is not available", "fewer GPUs"),
    ("Invalid generic resource (gres) specification", "`gpu_type`"),
    ("Requested time limit is invalid (missing or exceeds some limit)", "`limits: {max_time"),
    ("QOSMaxWallDurationPerJobLimit\n{policy}", "`limits: {max_time"),
    ("QOSMaxSubmitJobPerUserLimit\n{policy}", "have ended"),
    ("QOSMaxGRESPerJob\n{policy}", "fewer GPUs"),
    ("{policy}", "another qos"),
    ("Unable to contact slurm controller (connect failure)", "later"),
    ("sbatch: fatal: Could not establish a configuration source", "a login node"),
    ("something nobody has seen", "the scheduler's words"),
]
POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


@pytest.mark.parametrize(("words", "advice"), REFUSALS, ids=[words[:40] for words, _ in REFUSALS])
def test_what_sbatch_says_comes_with_what_helps(words: str, advice: str) -> None:
    said = f"Batch job submission failed: {words.format(policy=POLICY)}"
    assert advice in (slurm.failed("sbatch", said).next_step or "")


# scancel, and a job's own state


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("33 RUNNING 4:59\n", ("RUNNING", 299.0)),
        ("33 COMPLETING 0:00\n", ("COMPLETING", 0.0)),
        ("33 PENDING 1-00:00:00\n", ("PENDING", 86400.0)),
        ("33_0 COMPLETED 0:00\n33 RUNNING 29:50\n", ("RUNNING", 1790.0)),  # a sibling's state is not its own
        ("\n", None),
        ("", None),
    ],
)
def test_the_own_job(
    clients: Clients, monkeypatch: pytest.MonkeyPatch, text: str, expected: tuple[str, float | None] | None
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "33")
    clients.says("squeue", text)
    assert slurm.own_job() == expected
    assert "--jobs=33" in clients.calls("squeue")[0]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400.0),  # a bare number is minutes
        ("4:59", 299.0),
        ("7-12:30:15", 7 * 86400 + 45015.0),
        ("UNLIMITED", None),
        ("1:2:3:4", None),
        ("", None),
    ],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert slurm.duration_s(text) == seconds


def test_clients_see_nothing_of_a_surrounding_job(clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_CLUSTERS_X", "SBATCH_ACCOUNT", "SQUEUE_FORMAT", "SACCT_FORMAT", "SCONTROL_ALL"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    clients.script("squeue", "env | grep -E '^(SLURM|SBATCH|SQUEUE|SACCT|SCONTROL|LC_ALL)' | sort")
    assert slurm.run(["squeue"]).splitlines() == [
        "LC_ALL=C",
        "SLURM_CONF=/etc/slurm/slurm.conf",
        "SLURM_TIME_FORMAT=%Y-%m-%dT%H:%M:%S",
    ]
