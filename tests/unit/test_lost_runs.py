"""What the last job of an experiment seals, though a dead grader holds the watcher's claim or the scheduler is slow; and who
claims nothing any more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Desk
from fakes import Clients, lines, squeue_line
from plans import UID, experiment, profile

from autorl_hpc.cluster.job_table import read_submitted, write_submitted
from autorl_hpc.cluster.slurm import SchedulerError
from autorl_hpc.files import atomic
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.queue import Claims, HeartbeatWatch, claimed_entries, write_heartbeat
from autorl_hpc.files.run_view import RunView
from autorl_hpc.grading import lost_runs
from autorl_hpc.grading.lost_runs import ENTRY, Watcher, seal_what_is_lost
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.cluster import SlurmJobs, Submitted
from autorl_hpc.records.exchange import Heartbeat
from autorl_hpc.records.run import ExperimentRecord
from autorl_hpc.states import EndedBy

AGENTS = f"exp.agents-1.{UID}"
PAUSE_S = 0.02
STALE_S = 1.0


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clients:
    made = Clients(tmp_path, monkeypatch)
    made.says("scontrol", error="slurm_load_jobs error: Invalid job id specified\n", code=1)
    made.says("squeue", lines([squeue_line("7_0", AGENTS, "CANCELLED", 1)]))
    return made


@pytest.fixture
def desk(tmp_path: Path, clients: Clients) -> Desk:
    """A run that began, and whose job was cancelled."""
    made = Desk(tmp_path / "root")
    record = experiment(1, profile(), root=str(tmp_path / "root"), grader={"stale_after_s": STALE_S})
    record = record.model_copy(update={"runs": (made.record.run_id,)})
    atomic.write_bytes(made.experiment.resolved, record.canonical())
    submit(made)
    return made


def submit(desk: Desk, *, asked_back: bool = False) -> None:
    job = Submitted(name=AGENTS, role="agents", number=1, runs=(desk.record.run_id,), job_id="7", asked_back=asked_back)
    write_submitted(desk.experiment, SlurmJobs(uid=UID, cluster="there", submitted=(job,)))


def sealed_by(desk: Desk) -> EndedBy | None:
    sealed = RunView.of(Ledger(desk.run).read()).sealed
    return None if sealed is None else sealed.ended_by


def watch(desk: Desk) -> HeartbeatWatch:
    return HeartbeatWatch(desk.experiment.graders, STALE_S)


def test_a_dead_watchers_claim_is_waited_for(desk: Desk) -> None:
    """Six looks, three seconds apart, are over long before a claim is free."""
    write_heartbeat(desk.experiment.graders, Heartbeat(grader="dead", host="h", pid=1, counter=5, state="idle"))
    assert Claims(desk.experiment.claims, "dead", "h", watch(desk)).take(ENTRY, {}) == 1
    seal_what_is_lost(desk.experiment, PAUSE_S, 0.1)
    assert sealed_by(desk) is EndedBy.CANCELLED
    assert claimed_entries(desk.experiment.claims) == {}


@pytest.mark.parametrize(("marked", "ended_by"), [(True, EndedBy.CANCELLED), (False, EndedBy.CRASHED)])
def test_what_cancel_took_away_is_cancelled_though_the_scheduler_forgot_it(
    desk: Desk, clients: Clients, monkeypatch: pytest.MonkeyPatch, marked: bool, ended_by: EndedBy
) -> None:
    monkeypatch.setattr(lost_runs, "JUST_SUBMITTED_S", 0.0)
    clients.says("squeue", "")
    if marked:
        (desk.experiment.cancel / desk.record.run_id).touch()
    seal_what_is_lost(desk.experiment, PAUSE_S, 0.1)
    assert sealed_by(desk) is ended_by


def watcher_of(desk: Desk, now: list[float]) -> Watcher:
    claims = Claims(desk.experiment.claims, "g", "h", watch(desk))
    return Watcher(desk.experiment, claims, 1.0, clock=lambda: now[0])


def test_a_run_is_sealed_once_its_clock_stood_still_for_a_minute_of_the_watchers(desk: Desk) -> None:
    """A supervisor writes its clock every 10 s: looks in between, however many, see the same counter of a run that lives."""
    now = [0.0]
    watcher = watcher_of(desk, now)
    for written in range(3):
        desk.intake.clock.persist()
        for _ in range(5):
            assert watcher.step() and sealed_by(desk) is None, written
            now[0] += 9.9
    now[0] += 61.0
    assert watcher.step() and watcher.step() and sealed_by(desk) is EndedBy.CANCELLED


SCONTROL = """case "$*" in
*config*) echo "MaxArraySize = 1001" ;;
*partition*) echo "PartitionName=p Default=YES MaxTime=UNLIMITED" ;;
*) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1 ;;
esac"""


@pytest.mark.parametrize(
    ("state", "attempts", "sbatch", "ended_by"),
    [
        ("NODE_FAIL", 3, "echo Submitted batch job 9", None),
        ("COMPLETED", 3, "echo Submitted batch job 9", None),
        ("NODE_FAIL", 1, "echo Submitted batch job 9", EndedBy.CRASHED),
        ("NODE_FAIL", 3, "exit 1", EndedBy.CRASHED),  # nodes that may not submit
        ("DEADLINE", 3, "echo Submitted batch job 9", EndedBy.CRASHED),  # would fail the same way
        ("CANCELLED", 3, "echo Submitted batch job 9", EndedBy.CANCELLED),
    ],
)
def test_what_the_cluster_lost_is_submitted_again_as_often_as_attempts_allows(
    desk: Desk, clients: Clients, state: str, attempts: int, sbatch: str, ended_by: EndedBy | None
) -> None:
    record = parse_record(ExperimentRecord, json.loads(desk.experiment.resolved.read_bytes()), "")
    spec = record.spec.model_copy(update={"attempts": attempts})
    atomic.write_bytes(desk.experiment.resolved, record.model_copy(update={"spec": spec}).canonical())
    clients.script("scontrol", SCONTROL)
    clients.script("sbatch", sbatch)
    clients.says("scancel")
    clients.says("squeue", lines([squeue_line("7_0", AGENTS, state, 1)]))
    now = [0.0]
    watcher = watcher_of(desk, now)
    for _ in range(6):
        assert watcher.step()
        now[0] += 61.0
    assert sealed_by(desk) is ended_by
    jobs = read_submitted(desk.experiment)
    assert jobs is not None
    launches = [job for job in jobs.submitted if desk.record.run_id in job.runs and not job.asked_back]
    assert len(launches) == (2 if ended_by is None else 1)


def scontrol_line(state: str, task: str = "0") -> str:
    return f"JobId=8 ArrayJobId=7 ArrayTaskId={task} JobName={AGENTS} JobState={state} Reason=None\n"


WAITS = f"JobId=7 ArrayJobId=7 ArrayTaskId=0-3%2 JobName={AGENTS} JobState=PENDING Reason=Priority\n"


@pytest.mark.parametrize(
    ("scontrol", "ended_by"),
    [
        (scontrol_line("RUNNING"), None), (WAITS, None), (scontrol_line("RUNNING", "1"), EndedBy.CRASHED),
        (WAITS.replace("0-3", "1-3,5"), EndedBy.CRASHED), (scontrol_line("COMPLETED"), EndedBy.CRASHED),
        (scontrol_line("RUNNING").replace(AGENTS, "reused"), EndedBy.CRASHED),
    ],
)  # fmt: skip
def test_a_run_that_squeue_leaves_out_is_sealed_only_if_scontrol_agrees(
    desk: Desk, clients: Clients, monkeypatch: pytest.MonkeyPatch, scontrol: str, ended_by: EndedBy | None
) -> None:
    """A live run was sealed as crashed when squeue answered empty twice."""
    now, sealed = [0.0], set[EndedBy]()

    def job(what: str, given: list[Any]) -> int:
        sealed.update(row["ended_by"] for row in given if what == "seal")
        return 1

    watcher = watcher_of(desk, now)
    monkeypatch.setattr(watcher, "_job", job)
    clients.says("squeue", "")
    clients.says("scontrol", scontrol)
    for _ in range(6):
        assert watcher.step()
        now[0] += 61.0
        watcher._first_seen = dict.fromkeys(watcher._first_seen, -1e9)
    assert sealed == ({ended_by} if ended_by else set())


def test_an_answer_without_the_watchers_own_job_is_trouble(
    desk: Desk, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    watcher = watcher_of(desk, now)
    assert watcher.step() and watcher.step()
    now[0] = 61.0
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    with pytest.raises(SchedulerError, match="lacks job 5"):
        watcher.step()
    assert sealed_by(desk) is None
    clients.says("squeue", lines([squeue_line("7_0", AGENTS, "CANCELLED", 1), squeue_line("5", "grader", "RUNNING")]))
    assert watcher.step() and sealed_by(desk) is EndedBy.CANCELLED


def test_a_job_that_was_just_submitted_is_not_lost(desk: Desk, clients: Clients) -> None:
    clients.says("squeue", "")
    now = [0.0]
    watcher = watcher_of(desk, now)
    for _ in range(4):
        assert watcher.step() and sealed_by(desk) is None
        now[0] += 61.0
