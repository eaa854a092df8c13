"""How many cores and how much memory a process may use, by the files of both versions of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autorl_hpc.grading.engines.weights_cache import usable_bytes
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


MIB = 2**20


@pytest.mark.parametrize(
    ("groups", "files", "environ", "expected"),
    [
        (V2, {"slurm/job_2/memory.max": str(30 * MIB), "slurm/job_2/step_0/memory.max": "max\n", "memory.max": "max"}, {}, 30),
        (V2, {"slurm/job_2/memory.max": str(30 * MIB)}, {"SLURM_MEM_PER_NODE": "20"}, 20),
        (V2, {"slurm/job_2/memory.max": str(30 * MIB)}, {"SLURM_MEM_PER_NODE": "0", "SLURM_MEM_PER_CPU": "40"}, 30),
        (V1, {"memory/slurm/memory.limit_in_bytes": str(50 * MIB), "memory/memory.limit_in_bytes": str(2**63 - 4096)}, {}, 50),
        (V1, {"cpu,cpuacct/slurm/uid_1/memory.max": "1"}, {}, 64),
        (None, {}, {"SLURM_MEM_PER_CPU": "4", "SLURM_CPUS_ON_NODE": "8"}, 32),
        (V2, {}, {"SLURM_MEM_PER_NODE": "all"}, 64),
    ],
)  # fmt: skip
def test_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str | None,
    files: dict[str, str],
    environ: dict[str, str],
    expected: int,
) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * 256}[name])
    own = tmp_path / "own"
    if groups is not None:
        own.write_text(groups)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    assert usable_bytes(tmp_path / "fs", own, environ) == expected * MIB
