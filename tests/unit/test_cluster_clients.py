"""Clients that fail, refuse or hang; a job that is cancelled, and a job's own state."""

from __future__ import annotations

import time
from pathlib import Path

import ourjobs
import pytest
from fakes import Clients, lines
from ourjobs import AGENTS

from autorl_hpc.cluster import slurm
from autorl_hpc.cluster.slurm import SchedulerError
from autorl_hpc.errors import Exit
from autorl_hpc.states import Fault

clients = ourjobs.clients

DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"


# clients that fail


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


def test_a_client_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Clients(tmp_path, monkeypatch, alone=True)
    assert not slurm.available()
    with pytest.raises(SchedulerError, match="there is no squeue on this host") as caught:
        slurm.jobs([AGENTS])
    assert "--cluster local" in (caught.value.next_step or "")


def test_a_silent_failure_and_a_long_one(clients: Clients) -> None:
    clients.says("squeue", code=1)
    with pytest.raises(SchedulerError, match="it failed without a word"):
        slurm.jobs([AGENTS])
    clients.says("squeue", error=lines([f"error {n}" for n in range(1000)]), code=1)
    with pytest.raises(SchedulerError) as caught:
        slurm.jobs([AGENTS])
    assert caught.value.what.startswith("squeue: error 0 | error 1 |") and len(caught.value.what) < 1100


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


REFUSALS = [
    ("Invalid account or account/partition combination specified", "`account`"),
    ("invalid partition specified: gpux\nInvalid partition name specified", "`partition`"),
    ("User's group not permitted to use this partition", "`partition`"),
    ("Invalid qos specification", "`qos`"),
    ("Invalid feature specification", "`constraint`"),
    ("Requested reservation is invalid", "`reservation`"),
    ("Requested node configuration is not available", "fewer GPUs"),
    ("Invalid generic resource (gres) specification", "`gpu_type`"),
    ("Requested time limit is invalid (missing or exceeds some limit)", "`limits: {max_time"),
    ("Invalid job array specification", "`limits: {max_array_size"),
    ("Memory specification can not be satisfied", "less memory"),
    ("QOSMaxWallDurationPerJobLimit\n{policy}", "`limits: {max_time"),
    ("AssocMaxWallDurationPerJobLimit\n{policy}", "`limits: {max_time"),
    ("AssocMaxSubmitJobLimit\n{policy}", "have ended"),
    ("QOSMaxSubmitJobPerUserLimit\n{policy}", "have ended"),
    ("QOSMaxGRESPerJob\n{policy}", "fewer GPUs"),
    ("{policy}", "another qos"),
    ("Unable to contact slurm controller (connect failure)", "later"),
    ("Socket timed out on send/recv operation", "later"),
    ("sbatch: fatal: Could not establish a configuration source", "a login node"),
    ("something nobody has seen", "the scheduler's words"),
]
POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


@pytest.mark.parametrize(("words", "advice"), REFUSALS, ids=[words[:40] for words, _ in REFUSALS])
def test_what_sbatch_says_comes_with_what_helps(words: str, advice: str) -> None:
    said = f"Batch job submission failed: {words.format(policy=POLICY)}"
    assert advice in (slurm.failed("sbatch", said).next_step or "")


# scancel, and a job's own state


def test_a_job_that_has_ended_is_cancelled_without_complaint(clients: Clients) -> None:
    clients.says("scancel", error="scancel: error: Kill job error on job id 5: Invalid job id specified\n", code=1)
    slurm.cancel(["5"])
    slurm.cancel([])
    assert clients.calls("scancel") == [["5"]]
    clients.says("scancel", error="scancel: error: Access/permission denied\n", code=1)
    with pytest.raises(SchedulerError, match="denied"):
        slurm.cancel(["5"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("RUNNING 4:59\n", ("RUNNING", 299.0)),
        ("RUNNING UNLIMITED\n", ("RUNNING", None)),
        ("COMPLETING 0:00\n", ("COMPLETING", 0.0)),
        ("PENDING 1-00:00:00\n", ("PENDING", 86400.0)),
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


def test_the_own_job_can_not_always_be_told(clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert slurm.own_job() is None
    monkeypatch.setenv("SLURM_JOB_ID", "33")
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    clients.says("squeue", error=DOWN, code=1)
    assert slurm.own_job() is None


def test_the_own_jobs_end_is_known_where_squeue_can_not_be_asked(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "33")
    ends_at = int(time.time()) + 600
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(ends_at))
    clients.says("squeue", error=DOWN, code=1)
    told = slurm.own_job()
    assert told is not None and told[0] == "RUNNING"
    assert told[1] is not None and ends_at - time.time() - 1 <= told[1] <= 600
    monkeypatch.setenv("SLURM_JOB_END_TIME", "soon")
    assert slurm.own_job() is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400.0),  # a bare number is minutes
        ("4:59", 299.0),
        ("0:00", 0.0),
        ("01:02:03", 3723.0),
        ("24:00:00", 86400.0),
        ("1-00:00:00", 86400.0),
        ("7-12:30:15", 7 * 86400 + 45015.0),
        ("2-12", 2 * 86400 + 12 * 3600.0),
        ("2-12:30", 2 * 86400 + 12 * 3600 + 1800.0),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("NOT_SET", None),
        ("Partition_Limit", None),
        ("infinite", None),
        ("N/A", None),
        ("-5:00", None),
        ("1-", None),
        ("1:2:3:4", None),
        ("", None),
        (" 5", None),
    ],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert slurm.duration_s(text) == seconds
