"""What everyday clusters do to jobs, one a test. Each run ends finished or with its right fault, with nothing lost, nothing
twice, and the budget that was really used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from helpers import SUBMITS_ONE
from slurm_world import BEATS, LONG, SLACK_S, SLEEPS, World, kill, saved_jobs

from autorl_hpc.files.processes import descendants
from autorl_hpc.states import EndedBy, Fault

if TYPE_CHECKING:
    from conftest import Sandbox

pytestmark = pytest.mark.slurm

MakeWorld = Callable[..., World]
SMALL = ("--gpu-nodes", "1", "--gpus", "2", "--cpu-nodes", "1")

EATS = """#!/usr/bin/env bash
cd "$WORKSPACE"
echo "attempt $AUTORL_ATTEMPT" >> output/attempts
exec python3 -c '
import time
block = []
while True:
    if len(block) < 50:  # 2.5 GB: more than the job has, and not more than the machine, however late that is seen
        block.append(bytearray(b"x" * 50_000_000))
    time.sleep(0.02)
'
"""


def test_scontrol_requeue_goes_on_where_it_was(world: MakeWorld, slurm: Sandbox) -> None:
    here = world(slurm)
    here.agent("beats", BEATS)
    here.launch(["beats"], budget={"wall_clock": "40s"})
    (run,) = here.runs
    here.wait_agent(run)
    here.until(lambda: here.really_ran_s(run) > 9, "nine seconds of work")
    with here.recovery("scontrol requeue: the agent works again"):
        slurm.client("scontrol", "requeue", here.job_of("agents", 0))
        here.wait_agent(run, attempt=2)
    here.wait_over()
    here.assert_whole()
    here.assert_used_up(run, 40.0)


@pytest.mark.soak
def test_preemption_by_a_higher_partition(world: MakeWorld, new_sandbox: Callable[..., Sandbox]) -> None:
    sandbox = new_sandbox(*SMALL)
    sandbox.up()
    here = world(sandbox, agent={"partition": "preempt"})
    here.agent("beats", BEATS)
    here.launch(["beats"], budget={"wall_clock": LONG})
    (run,) = here.runs
    here.wait_agent(run)
    here.until(lambda: here.really_ran_s(run) > 9, "nine seconds of work")
    with here.recovery("preemption: the agent has stopped"):
        high = sandbox.sbatch("sleep 3", "--partition=gpu", "--gres=gpu:1", "--output=/dev/null")
        here.until(lambda: here.view(run).ended, "the first attempt to stop cleanly")
    assert here.view(run).ended[0].reason.startswith("signal ")
    sandbox.wait(high, "COMPLETED")
    with here.recovery("preemption: the agent works again, from the end of the job that took its place"):
        here.wait_agent(run, attempt=2)
    here.until(lambda: here.really_ran_s(run) > 11, "work of the second attempt")
    here.over(run)
    here.wait_over()
    here.assert_whole()
    here.assert_budget(run)
    assert here.view(run).sealed.ended_by is EndedBy.AGENT_EXIT  # type: ignore[union-attr]


@pytest.mark.soak
def test_a_node_that_is_lost_and_comes_back(world: MakeWorld, new_sandbox: Callable[..., Sandbox]) -> None:
    sandbox = new_sandbox("--gpu-nodes", "2", "--gpus", "2", "--cpu-nodes", "1")
    sandbox.up()
    here = world(sandbox, agent={"sbatch": {"exclude": "gpu01"}}, grader={"sbatch": {"exclude": "gpu02"}})
    here.agent("beats", BEATS)
    here.launch(["beats"], budget={"wall_clock": LONG})
    (run,) = here.runs
    here.wait_agent(run)
    job = here.job_of("agents", 0)
    kill(sandbox.pid("slurmd.gpu02"))
    sandbox.client("scontrol", "update", f"jobid={job}", "ExcNodeList=", check=False)
    with here.recovery("slurmd killed: Slurm puts the job back in line"):
        here.until(lambda: sandbox.state(job) == "PENDING", "the job to be put back in line")
    assert len(here.view(run).attempts) == 1
    with here.recovery("slurmd back, old attempt alive: the new agent works"):
        sandbox.up()  # slurmd is back while the first attempt still works: two may be alive at once
        here.wait_agent(run, attempt=2)
    here.over(run)
    here.wait_over()
    here.assert_whole()
    here.assert_budget(run)
    assert len(here.view(run).attempts) >= 2
    here.assert_no_process()


@pytest.mark.soak
def test_a_node_that_is_lost_where_nothing_is_requeued(world: MakeWorld, new_sandbox: Callable[..., Sandbox]) -> None:
    sandbox = new_sandbox("--gpu-nodes", "2", "--gpus", "2", "--cpu-nodes", "1")
    sandbox.up()
    here = world(
        sandbox, requeue=False, agent={"sbatch": {"nodelist": "gpu02"}}, grader={"sbatch": {"nodelist": "gpu01"}}
    )
    here.agent("beats", BEATS)
    here.launch(["beats"], budget={"wall_clock": LONG}, attempts=1)
    (run,) = here.runs
    here.wait_agent(run)
    with here.recovery("slurmd killed, no requeue: the run is closed as the cluster's fault"):
        kill(sandbox.pid("slurmd.gpu02"))
        here.until(lambda: here.view(run).closed, "the run to be closed")
    sealed = here.view(run).sealed
    assert sealed is not None
    assert (sealed.ended_by, sealed.fault) == (EndedBy.CRASHED, Fault.CLUSTER)
    assert "ended NODE_FAIL: its node failed" in (sealed.reason or "")
    sandbox.up()
    here.wait_over()
    here.assert_whole()
    here.assert_no_process()


@pytest.mark.parametrize("when", ["at once", "later"])
@pytest.mark.soak
def test_the_controller_is_killed(world: MakeWorld, new_sandbox: Callable[..., Sandbox], when: str) -> None:
    sandbox = new_sandbox(*SMALL)
    sandbox.up()
    here = world(sandbox)
    here.agent("one", SUBMITS_ONE + "sleep 12\n")
    here.launch(["one", "null"], parallel=1)
    if when == "later":  # Slurm saves its state some seconds late: what is older than that it knows again
        here.until(lambda: f"exp.report.{here.submitted.uid}".encode() in saved_jobs(sandbox), "a save")
    with here.recovery(f"slurmctld killed {when}: all runs are closed"):
        kill(sandbox.pid("slurmctld"))
        sandbox.up()
        if when == "at once":  # jobs may be lost without a trace: what is missing is submitted anew
            here.launch()
        here.until(lambda: here.finished(here.runs), "all runs to be closed")
    here.wait_over()
    here.assert_whole()
    view = here.view(
        here.runs[0]
    )  # an agent that begins anew may write over what it dropped before: that one is refused
    assert view.closed is not None and view.closed.selected in {one.submission_id for one in view.accepted()}


@pytest.mark.soak
def test_memory_used_up_as_slurm_sees_it(world: MakeWorld, slurm: Sandbox) -> None:
    here = world(slurm)
    here.agent("eats", EATS)
    here.launch(["eats"])
    (run,) = here.runs
    here.wait_agent(run)
    with here.recovery("memory used up (Slurm's polling): the run is closed as the agent's fault"):
        here.wait_over()
    here.assert_whole()
    sealed = here.view(run).sealed
    assert sealed is not None
    assert sealed.fault is Fault.AGENT, sealed
    assert sealed.ended_by is EndedBy.OUT_OF_MEMORY, sealed
    assert "memory was used up" in (sealed.reason or "")


@pytest.mark.soak
def test_memory_used_up_in_a_cgroup(world: MakeWorld, new_sandbox: Callable[..., Sandbox]) -> None:
    sandbox = new_sandbox(*SMALL, "--cgroup")
    sandbox.up()
    here = world(sandbox)
    here.agent("eats", EATS)
    here.launch(["eats"])
    (run,) = here.runs
    here.wait_over()
    here.assert_whole()
    sealed = here.view(run).sealed
    assert sealed is not None and sealed.fault is Fault.AGENT, sealed
    assert str(sealed.reason).startswith("the agent exited with code -9"), (
        "the kernel ends the largest process: the supervisor lives"
    )
    assert sandbox.state(here.job_of("agents", 0)) == "OUT_OF_MEMORY"


@pytest.mark.soak
def test_scancel_of_an_agent(world: MakeWorld, slurm: Sandbox) -> None:
    here = world(slurm)
    here.agent("beats", BEATS)
    here.launch(["beats"], matrix={"seed": [0, 1]}, parallel=1, budget={"wall_clock": LONG})
    here.wait_agent(here.runs[0])
    here.until(lambda: here.really_ran_s(here.runs[0]) > 2, "some work")
    with here.recovery("scancel of an array, one running, one waiting: both are closed, no job is left"):
        slurm.client("scancel", here.job_of("agents"))  # one runs, one waits
        here.wait_over()
    here.assert_whole()
    here.assert_budget(here.runs[0])
    for run in here.runs:
        sealed = here.view(run).sealed
        assert sealed is not None
        assert (sealed.ended_by, sealed.fault) == (EndedBy.CANCELLED, None), sealed
        assert "scancel" in (sealed.reason or "")


@pytest.mark.soak
def test_scancel_of_a_grader_and_of_the_report(world: MakeWorld, slurm: Sandbox) -> None:
    here = world(slurm)
    told = "until [ -e code/over ]; do sleep 0.2; done\n"
    here.agent("slow", SUBMITS_ONE + told + "variants 1 1\n./submit output/v1 --wait\n")
    here.launch(["slow"], budget={"wall_clock": LONG})
    here.until(lambda: here.view(here.runs[0]).accepted(), "a submission")
    with here.recovery("scancel of a grader: the next link has scored"):
        slurm.client("scancel", here.job_of("grader-0"))
        slurm.client("scancel", here.job_of("report"))
        here.over(here.runs[0])
        here.until(lambda: len(here.view(here.runs[0]).scores) == 2, "another score")
    here.wait_over()
    here.assert_whole()
    assert len(here.view(here.runs[0]).scores) == 2
    assert not (here.experiment.report / "index.html").exists()
    here.run("report", str(here.experiment.path))


@pytest.mark.soak
def test_the_jobs_folder_is_deleted_while_jobs_wait(world: MakeWorld, new_sandbox: Callable[..., Sandbox]) -> None:
    sandbox = new_sandbox(*SMALL)
    sandbox.up()
    here = world(sandbox)
    hog = sandbox.sbatch("sleep 600", "--gres=gpu:1", "--output=/dev/null")
    sandbox.wait(hog, "RUNNING")
    here.launch(["null"], matrix={"seed": [0, 1]}, attempts=1)
    here.until(lambda: sandbox.state(here.job_of("grader-0")) == "RUNNING", "a grader")
    here.until(here.heartbeats, "the grader's first beat")
    shutil.rmtree(here.experiment.jobs)
    with here.recovery("jobs/ deleted while jobs wait (0:53): the runs are closed as the cluster's fault"):
        sandbox.client("scancel", hog)
        here.wait_over()
    for run in here.runs:
        sealed = here.view(run).sealed
        assert sealed is not None
        assert (sealed.ended_by, sealed.fault) == (EndedBy.CRASHED, Fault.CLUSTER)
        assert "0:53: it never ran" in (sealed.reason or ""), sealed
    here.experiment.jobs.mkdir()
    here.assert_whole()


@pytest.mark.timeout(1800)
@pytest.mark.soak
def test_sixty_runs_in_one_array(world: MakeWorld, slurm: Sandbox) -> None:
    before = slurm.options
    slurm.down()
    slurm.options = tuple("1001" if option == "10" else option for option in before)
    slurm.up()
    try:
        here = world(slurm, agent={"memory": "256M"})
        here.launch(["null"], matrix={"seed": list(range(60))}, parallel=6)
        here.wait_over(patience_s=1500)
        here.assert_whole()
        assert all(here.view(run).sealed.ended_by is EndedBy.AGENT_EXIT for run in here.runs)  # type: ignore[union-attr]
        assert set(here.queue().values()) == {"COMPLETED"}
        assert os.listdir(here.experiment.claims) == []
    finally:
        slurm.down()
        slurm.options = before
        slurm.up()


def test_everything_in_a_job_is_killed_at_once(world: MakeWorld, slurm: Sandbox) -> None:
    """Supervisor, keeper and agent alike: what is left is the time that the keeper noted last."""
    here = world(slurm)
    here.agent("beats", BEATS)
    here.launch(["beats"], budget={"wall_clock": LONG})
    (run,) = here.runs
    here.wait_agent(run)
    here.until(lambda: here.really_ran_s(run) > SLACK_S + 2, "more seconds of work than may be lost")
    shown = slurm.client("pgrep", "-f", f"job task {here.experiment.path.resolve()}").stdout.split()
    assert len(shown) == 1, shown
    task = int(shown[0])
    with here.recovery(
        "everything in a job killed: the agent works again, in a job that the grader's watcher submitted"
    ):
        kill(task, *descendants(task))
        here.wait_agent(run, attempt=2)
    here.over(run)
    here.wait_over()
    here.assert_whole()
    here.assert_budget(run)
    assert here.view(run).sealed.ended_by is EndedBy.AGENT_EXIT  # type: ignore[union-attr]


@pytest.mark.soak
def test_an_end_that_squeue_forgot_is_read_from_accounting(
    world: MakeWorld, new_sandbox: Callable[..., Sandbox]
) -> None:
    sandbox = new_sandbox("--accounting", *SMALL)
    sandbox.up()
    conf = sandbox.dir / "etc" / "slurm.conf"
    conf.write_text(conf.read_text().replace("MinJobAge=300", "MinJobAge=2"))
    sandbox.client("scontrol", "reconfigure")
    here = world(sandbox)
    here.agent("beats", BEATS)
    # The job ends and is forgotten between two looks.
    here.launch(["beats"], grader={"watch_every_s": 20}, budget={"wall_clock": LONG})
    (run,) = here.runs
    here.wait_agent(run)
    here.until(lambda: here.seen("agents"), "the watcher's first look")
    job = here.job_of("agents", 0)
    sandbox.client("scancel", job)
    here.until(lambda: here.view(run).sealed, "the run to be sealed")
    sealed = here.view(run).sealed
    assert sealed is not None and sealed.ended_by is EndedBy.CANCELLED, sealed
    assert f"job {job} ended CANCELLED" in (sealed.reason or "")
    known = ("squeue", "-h", "-t", "all", "-j", job)
    here.until(lambda: sandbox.client(*known, check=False).stdout == "", "squeue to know it no more")
    here.wait_over()
    here.assert_whole()


@pytest.mark.soak
def test_the_report_job_seals_what_no_grader_lived_to_seal(world: MakeWorld, slurm: Sandbox) -> None:
    here = world(slurm)
    here.agent("sleeps", SLEEPS)
    here.launch(["sleeps"], grader={"placement": "step"})
    (run,) = here.runs
    here.wait_agent(run)
    slurm.client("scancel", here.job_of("agents"))
    here.until(lambda: here.view(run).sealed, "the run to be sealed")
    sealed = here.view(run).sealed
    assert sealed is not None and (sealed.ended_by, sealed.fault) == (EndedBy.CANCELLED, None)
    here.until(lambda: not here.alive_jobs(), "the report's end")
    here.launch()  # a grader closes it
    here.wait_over()
    here.assert_whole()
