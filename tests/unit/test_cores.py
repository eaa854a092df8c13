"""How many cores and how much memory a process may use, by the files of both versions of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autorl_hpc.rollouts.cores import usable_cores

V1 = "3:cpu,cpuacct:/slurm/uid_1/job_2\n2:memory:/slurm\n"
V2 = "0::/slurm/job_2/step_0\n"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (V2, {"slurm/job_2/cpu.max": "250000 100000\n"}, 3),
        (V2, {"slurm/job_2/step_0/cpu.max": "max 100000\n", "slurm/cpu.max": "50000 100000\n"}, 1),
        (V2, {"slurm/job_2/step_0/cpu.max": "max 100000\n"}, 8),
        (V2, {"slurm/job_2/step_0/cpu.max": "what?\n"}, 8),
        (V2, {}, 8),
        (V1, {"cpu,cpuacct/slurm/uid_1/cpu.cfs_quota_us": "400000", "cpu,cpuacct/slurm/uid_1/cpu.cfs_period_us": "100000"}, 4),
        (V1, {"cpu,cpuacct/slurm/cpu.cfs_quota_us": "-1", "cpu,cpuacct/slurm/cpu.cfs_period_us": "100000"}, 8),
        (V2, {"slurm/job_2/cpu.max": "6400000 100000\n"}, 8),
        ("nonsense\n", {"cpu.max": "200000 100000\n"}, 8),
        (None, {"cpu.max": "200000 100000\n"}, 8),
    ],
)  # fmt: skip
def test_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str | None, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    own = tmp_path / "own"
    if groups is not None:
        own.write_text(groups)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    assert usable_cores(tmp_path / "fs", own) == expected
