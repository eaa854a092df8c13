"""Launches that fail midway, with a real Slurm: what they had submitted is gone, or is told and taken back later."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers import SLURM_PATIENCE_S, SUBMITS_ONE
from slurm_world import LONG, SLEEPS, World

if TYPE_CHECKING:
    from conftest import Sandbox

pytestmark = pytest.mark.slurm

MakeWorld = Callable[..., World]

LIES = """#!/bin/bash
# Submits, and from the {call}. call on says that it could not.
n=$(($(cat {count} 2>/dev/null || echo 0) + 1)); echo $n >{count}
{before}
/usr/bin/sbatch {options} "$@" >{count}.out || exit
if [ $n -ge {call} ]; then echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2; exit 1; fi
cat {count}.out
"""


def lying_sbatch(here: World, call: int, before: str = "", options: str = "") -> dict[str, str]:
    """The environment with an sbatch in front that works and then says that it didn't.

    Args:
        before: what it does before each call.
        options: what it gives sbatch besides.
    """
    folder = here.root.path / "front"
    folder.mkdir(exist_ok=True)
    (folder / "sbatch").write_text(LIES.format(call=call, count=folder / "count", before=before, options=options))
    (folder / "sbatch").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_a_job_that_was_accepted_though_sbatch_failed_is_found_and_taken_back(world: MakeWorld, slurm: Sandbox) -> None:
    here = world(slurm)
    here.agent("one", SUBMITS_ONE)
    here.more_env = lying_sbatch(here, 2, options="--hold")  # else it may begin before it is taken back
    done = here.launch(["one"], check=False)
    assert done.returncode == 3 and "Socket timed out" in done.stderr, done.stderr
    assert "the 1 jobs submitted before it were taken back" in done.stderr
    assert here.alive_jobs() == []
    assert all(job.taken_back for job in here.submitted.submitted)
    here.more_env = {}
    here.launch()
    here.wait_over()
    here.assert_whole()
    assert len(here.view(here.runs[0]).attempts) == 1, "the job that was taken back never had the run"


@pytest.mark.soak
def test_a_scheduler_that_is_down_is_told_and_the_next_launch_takes_back(
    world: MakeWorld, new_sandbox: Callable[..., Sandbox]
) -> None:
    sandbox = new_sandbox("--gpu-nodes", "1", "--gpus", "2", "--cpu-nodes", "1")
    sandbox.up()
    here = world(sandbox)
    controller = sandbox.pid("slurmctld")
    stop = f"[ $n -lt 3 ] || kill -STOP {controller}"
    here.more_env = lying_sbatch(here, 99, stop)
    try:
        done = here.launch(["null"], check=False)
    finally:
        os.kill(controller, signal.SIGCONT)
    assert done.returncode == 3, done.stderr
    assert "the scheduler could not be asked" in done.stderr and "were taken back" not in done.stderr
    assert all(job.asked_back and not job.taken_back for job in here.submitted.submitted)
    here.more_env = {}
    time.sleep(3)
    here.launch()
    here.wait_over()
    here.assert_whole()
    sealed = here.view(here.runs[0]).sealed
    assert sealed is not None and sealed.ended_by == "agent_exit", "not taken for a person's scancel"


@pytest.mark.soak
def test_ctrl_c_takes_back(world: MakeWorld, slurm: Sandbox) -> None:
    here = world(slurm)
    here.agent("sleeps", SLEEPS)
    here.launch(["sleeps"], "--dry-run")
    front = here.root.path / "front"
    here.more_env = lying_sbatch(here, 99, "[ $n -lt 3 ] || while sleep 0.1; do :; done")  # until the ctrl-C
    launching = here.start("launch", "exp.yaml")
    here.until((front / "count.out").exists, "the first call")
    here.until(lambda: (front / "count").read_text().strip() == "3", "the third call")
    launching.send_signal(signal.SIGINT)
    assert launching.wait(SLURM_PATIENCE_S) == 130, here.logs()
    assert here.alive_jobs() == []
    left = [path.name for path in here.experiment.jobs.iterdir() if path.name.startswith(("launching", ".sub"))]
    assert left == []


@pytest.mark.soak
def test_a_deleted_slurm_json_is_no_licence_to_submit_twice(world: MakeWorld, slurm: Sandbox) -> None:
    here = world(slurm)
    here.agent("sleeps", SLEEPS)
    here.launch(["sleeps"])
    file: Path = here.experiment.path / "slurm.json"
    text = file.read_text()
    file.unlink()
    done = here.launch(check=False)
    assert done.returncode == 1 and "would submit them again" in done.stderr and "scancel" in done.stderr
    file.write_text(text)
    here.run("cancel", str(here.experiment.path))
    assert here.alive_jobs() == []


@pytest.mark.soak
def test_cancel_where_graders_are_in_the_agents_jobs_still_scores(world: MakeWorld, slurm: Sandbox) -> None:
    here = world(slurm)
    here.agent("one", SUBMITS_ONE + "sleep 600\n")
    here.launch(["one"], matrix={"seed": [0, 1]}, grader={"placement": "step"}, budget={"wall_clock": LONG})
    here.until(lambda: all(here.view(run).accepted() for run in here.runs), "both submissions")
    here.run("cancel", str(here.experiment.path))
    assert here.alive_jobs() == []
    here.assert_no_process()
    here.assert_whole()
    assert all(here.view(run).scores for run in here.runs)
