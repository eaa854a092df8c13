"""bin/slurm-sandbox: starts, runs jobs, survives kills, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers import wait_for
from slurm_world import kill, saved_jobs

if TYPE_CHECKING:
    from conftest import Sandbox

pytestmark = pytest.mark.slurm

SMALL = ("--gpu-nodes", "1", "--cpu-nodes", "1", "--gpus", "1")
SCRIPT = Path(__file__).resolve().parents[2] / "bin" / "slurm-sandbox"


def node_states(sandbox: Sandbox) -> dict[str, str]:
    lines = sandbox.client("sinfo", "-h", "-N", "-o", "%N %t").stdout.splitlines()
    return dict(line.split() for line in lines)


def test_job_gets_a_gpu_and_ends_without_accounting(slurm: Sandbox) -> None:
    job = slurm.sbatch('echo "gpus=$CUDA_VISIBLE_DEVICES node=$SLURMD_NODENAME"', "--gpus=2", "--output=job.out")
    slurm.wait(job, "COMPLETED")
    text = (slurm.dir / "job.out").read_text()
    assert "gpus=0,1" in text
    assert "node=gpu0" in text
    assert slurm.client("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").stdout.strip() == "COMPLETED"
    assert "disabled" in slurm.client("sacct", check=False).stderr


@pytest.mark.soak
def test_up_brings_back_what_was_killed_and_jobs_run_on(slurm: Sandbox) -> None:
    job = slurm.sbatch("sleep 300", "--output=/dev/null", "--job-name=survivor")
    slurm.wait(job, "RUNNING")
    wait_for(lambda: b"survivor" in saved_jobs(slurm), "a save")  # some seconds late: a younger job is lost
    kill(slurm.pid("slurmctld"), slurm.pid("slurmd.gpu01"))
    assert slurm.script("status").returncode == 1
    slurm.up()
    assert slurm.state(job) == "RUNNING"
    slurm.client("scancel", job)
    slurm.wait(job, "CANCELLED")


@pytest.mark.soak
def test_down_leaves_no_process_not_even_of_jobs(new_sandbox: Callable[..., Sandbox]) -> None:
    sandbox = new_sandbox(*SMALL)
    sandbox.up()
    left = f"(setsid {sys.executable} -c 'import time; time.sleep(300)' {sandbox.dir} &); sleep 300"
    job = sandbox.sbatch(left, "--output=/dev/null")
    sandbox.wait(job, "RUNNING")
    assert len(sandbox.processes()) > 4
    sandbox.down()
    assert sandbox.processes() == []
    assert sandbox.cgroups() == []
    assert sandbox.script("status").returncode == 1
    assert str(sandbox.dir) not in Path("/proc/mounts").read_text()
    sandbox.down("--wipe")
    assert not sandbox.dir.exists()


@pytest.mark.soak
def test_a_start_that_fails_is_taken_down_and_says_why(slurm: Sandbox, new_sandbox: Callable[..., Sandbox]) -> None:
    assert slurm.dir.exists()  # the packages are here
    broken = new_sandbox(*SMALL)
    (broken.dir / ".slurm-sandbox").touch()
    (broken.dir / "spool").mkdir()
    (broken.dir / "spool" / "gpu01").touch()  # the first slurmd, after munged and slurmctld, has no folder
    done = broken.script("up", *broken.options)
    assert done.returncode == 1
    assert "last lines of its logs" in done.stderr
    assert "slurmd.gpu01" in done.stderr
    assert broken.processes() == []


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    for options in (["up", "--dir", "/tmp/a b"], ["up", "--gpus"], ["up", "--gpu-nodes", "x"], ["dance"]):
        assert subprocess.run([str(SCRIPT), *options], capture_output=True, check=False).returncode == 2, options
    done = subprocess.run([str(SCRIPT), "down", "--wipe", "--dir", str(tmp_path)], capture_output=True, check=False)
    assert done.returncode in (0, 77)
    assert (tmp_path / "mine").exists()
