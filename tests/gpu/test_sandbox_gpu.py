"""CUDA, shared memory and NCCL inside each sandbox level. Needs a GPU, and two for NCCL; skips by name elsewhere.

`pytest tests/gpu/test_sandbox_gpu.py -s` prints what each level stops and what starting in it costs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import needs
import pytest

from autorl_hpc.sandbox.levels import LEVELS, Level
from autorl_hpc.sandbox.prove import cuda_works, probe
from autorl_hpc.sandbox.sandbox_plan import SOCKET_NAME, SandboxPlan, devices, lay_way_out, slurm_programs, software
from autorl_hpc.states import Network, SandboxLevel

pytestmark = needs.needs("gpu", cuda_works(), "no GPU here")

CUDA = """
import json, time, torch
begun = time.monotonic()
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
value = float((a @ a.T).float().diagonal().mean())
loader = torch.utils.data.DataLoader(list(range(256)), batch_size=32, num_workers=2)
total = int(sum(int(batch.sum()) for batch in loader))
print(json.dumps({"gpus": torch.cuda.device_count(), "mean": value, "total": total, "seconds": time.monotonic() - begun}))
"""

NCCL = """
import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
value = torch.full((1 << 22,), float(rank + 1), device="cuda")
for _ in range(5):
    dist.all_reduce(value)
    value /= dist.get_world_size()
torch.cuda.synchronize()
if rank == 0:
    print("NCCL", float(value[0]), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def plan(tmp_path: Path) -> SandboxPlan:
    for name in ("vault/t", "store/m", "runs/e", "scratch/w/.tmp", "scratch/w/.home", "socket"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "vault/t/items").write_text("gold")
    (tmp_path / "store/m/weights").write_text("w")
    workspace = tmp_path / "scratch/w"
    (workspace / "cuda.py").write_text(CUDA)
    (workspace / "nccl.py").write_text(NCCL)
    lay_way_out(str(tmp_path / "socket"))
    outer = dict(os.environ)
    return SandboxPlan(
        workspace=str(workspace),
        tmp=str(workspace / ".tmp"),
        readable=tuple(software([sys.prefix, sys.base_prefix], outer)),
        hidden=tuple(str(tmp_path / name) for name in ("vault", "store", "runs", "scratch")),
        placed=((str(tmp_path / "store/m"), str(workspace / "models")),),
        devices=tuple(devices()),
        masked=tuple(slurm_programs(outer)),
        socket_folder=str(tmp_path / "socket"),
        ways=((45321, SOCKET_NAME),),
    )


def environment(plan: SandboxPlan) -> dict[str, str]:
    kept = {
        name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES") if name in os.environ
    }
    return {**kept, "HOME": f"{plan.workspace}/.home", "TMPDIR": f"{plan.workspace}/.tmp", "USER": "agent"}


def run(level: Level, plan: SandboxPlan, *command: str) -> subprocess.CompletedProcess[str]:
    argv = level.argv(plan, [sys.executable, *command])
    return subprocess.run(
        argv, env=environment(plan), cwd=plan.workspace, check=False, capture_output=True, text=True, timeout=90
    )


@pytest.mark.parametrize("name", [level.name for level in LEVELS if level.name is not SandboxLevel.APPTAINER])
def test_cuda_and_nccl_work_inside(name: SandboxLevel, plan: SandboxPlan) -> None:
    level = next(level for level in LEVELS if level.name is name)
    plan = replace(plan, network=Network.OPEN if name is SandboxLevel.NONE else Network.NONE)
    if name is SandboxLevel.LANDLOCK:
        (Path(plan.workspace) / "models").symlink_to(plan.placed[0][0])
    why = level.why_not(plan)
    if why is not None:
        needs.skip("gpu", f"{name}: {why}")
    found = probe(level, plan, environment(plan), secret=[f"{plan.hidden[0]}/t/items"])
    print(f"\n{name}: holes {list(found.holes)}, start {found.start_s} s")
    assert not found.failures
    begun = time.monotonic()
    done = run(level, plan, "cuda.py")
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}: {said}, the whole process {time.monotonic() - begun:.1f} s")
    assert said["total"] == sum(range(256)) and 4000 < said["mean"] < 4200
    if said["gpus"] < 2:
        needs.skip("gpu", f"{name}: CUDA works; NCCL needs two GPUs")
    begun = time.monotonic()
    done = run(level, plan, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "nccl.py")
    print(f"{name}: NCCL over two GPUs {time.monotonic() - begun:.1f} s: {done.stdout.strip()}")
    assert "NCCL 1.5" in done.stdout, done.stderr[-3000:]
