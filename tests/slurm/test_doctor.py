"""`autorl-hpc doctor` against a real Slurm: it measures by jobs, and leaves neither a job nor a folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers import SLURM_PATIENCE_S, wait_for

if TYPE_CHECKING:
    from conftest import Sandbox

pytestmark = pytest.mark.slurm

REPO = Path(__file__).resolve().parents[2]
PROFILE = """name: mine
partition: gpu
gpu_type: fake
agent: {gpus: 1, cpus: 2, memory: 4G}
grader: {gpus: 1, memory: 4G}
report: {partition: REPORT, gpus: 0, cpus: 1}
"""

Facts = dict[tuple[str, str], dict[str, str]]


def start(sandbox: Sandbox, root: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "autorl_hpc", "doctor", "--root", str(root), "--json", *options],
        env={**sandbox.env, "PYTHONPATH": str(REPO)},
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def doctor(sandbox: Sandbox, root: Path, *options: str) -> tuple[int, Facts]:
    """Its exit code, and the findings by group and check."""
    process = start(sandbox, root, *options)
    out, err = process.communicate(timeout=SLURM_PATIENCE_S)
    assert process.returncode in (0, 1), err
    value: dict[str, Any] = json.loads(out)
    assert value["problems"] == sum(f["state"] == "problem" for f in value["findings"])
    return process.returncode, {(f["group"], f["check"]): f for f in value["findings"]}


def left(sandbox: Sandbox, root: Path) -> list[str]:
    """Living jobs of the doctor's, and what lies in the root."""
    jobs = sandbox.client("squeue", "--noheader", "--format=%j %T").stdout.splitlines()
    return [job for job in jobs if job.startswith("autorl-doctor-")] + os.listdir(root)


def profile(folder: Path, report: str = "cpu", more: str = "") -> str:
    path = folder / "mine.yaml"
    path.write_text(PROFILE.replace("REPORT", report) + more)
    return str(path)


def states(facts: Facts, group: str, *checks: str) -> set[str]:
    return {facts[group, check]["state"] for check in checks}


@pytest.mark.soak
def test_without_accounting_a_pair_of_nodes_and_a_gpu(slurm: Sandbox, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    code, facts = doctor(slurm, root, "--cluster", profile(tmp_path))
    assert code == 0, [f for f in facts.values() if f["state"] == "problem"]
    assert facts["Slurm", "accounting"]["state"] == "note"
    assert facts["Slurm", "MaxArraySize"]["value"].startswith("10;")
    assert states(facts, "Partitions", "agent job", "grader job", "report job", "GPUs as Slurm names them") == {"ok"}
    assert "gpu:fake:2" in facts["Partitions", "GPUs as Slurm names them"]["value"]
    assert facts["Jobs", "time from submit to run"]["state"] == "ok"
    node = next(group for group, check in facts if check == "CUDA_VISIBLE_DEVICES" and group.startswith("In a job"))
    assert node.startswith("In a job on gpu0")
    assert facts[node, "CUDA_VISIBLE_DEVICES"]["value"].isdigit()
    assert facts[node, "root"]["state"] == "ok"
    assert facts[node, "Python and packages"]["state"] == "ok"
    assert "are one machine" in facts["Two nodes", "the two nodes"]["value"]
    assert "cpu0" in facts["Two nodes", "the two nodes"]["value"]
    by_doing = ("new file, by listing", "renamed over, by open()", "link, raced", "flock")
    assert states(facts, "Two nodes", *by_doing) == {"ok"}
    assert left(slurm, root) == []


def test_a_profile_that_does_not_fit(slurm: Sandbox, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    code, facts = doctor(slurm, root, "--cluster", profile(tmp_path, report="none", more="python: /nowhere/python\n"))
    assert code == 1
    assert facts["Partitions", "partition none"]["state"] == "problem"
    assert "invalid partition" in facts["Partitions", "report job"]["value"].lower()
    node = next(group for group, check in facts if check == "Python of jobs")
    assert "No such file" in facts[node, "Python of jobs"]["value"]
    assert facts["Two nodes", "the pair"]["state"] == "unknown"
    assert left(slurm, root) == []


@pytest.mark.soak
def test_ctrl_c_leaves_nothing(slurm: Sandbox, tmp_path: Path) -> None:
    process = start(slurm, tmp_path)

    def has_a_job() -> bool:
        assert process.poll() is None, process.communicate()
        return any("autorl-doctor-" in name for name in left(slurm, tmp_path) if not name.startswith("."))

    wait_for(has_a_job, "a job of the doctor's")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=SLURM_PATIENCE_S)
    assert process.returncode == 130
    assert left(slurm, tmp_path) == []
