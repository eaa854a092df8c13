"""Level `apptainer`: the image that a run's environment is, started without anything of the machine but the plan."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from autorl_hpc.sandbox.sandbox_plan import INSIDE, SandboxPlan, inner_command, inside_script
from autorl_hpc.states import Network, SandboxLevel

name = SandboxLevel.APPTAINER


def program() -> str | None:
    """Apptainer, or Singularity, which it was called before."""
    return shutil.which("apptainer") or shutil.which("singularity")


def why_not(plan: SandboxPlan) -> str | None:
    """Why this level can't even be tried here; None: it can."""
    if plan.image is None:
        return "the run's environment is no image"
    return None if program() else "no apptainer here"


def known_holes(plan: SandboxPlan) -> tuple[str, ...]:
    """None but those that are found by trying."""
    return ()


def argv(plan: SandboxPlan, command: Sequence[str]) -> list[str]:
    """The command that runs `command` in the image. The image's own software is used, not the machine's."""
    assert plan.image is not None
    made = [
        program() or "apptainer",
        "--silent",
        "exec",
        "--contain",
        "--pid",
        "--ipc",
        "--uts",
        "--no-home",
        "--no-privs",
        "--workdir",
    ]
    made += [plan.tmp, "--pwd", plan.workspace, "--env", "TMPDIR=/tmp"]
    if any(os.path.basename(device).startswith("nvidia") for device in plan.devices):
        made.append("--nv")
    if plan.network is not Network.OPEN:
        made += ["--net", "--network", "none"]
    binds = [(plan.workspace, plan.workspace, "rw"), *((source, target, "ro") for source, target in plan.placed)]
    if plan.socket_folder is not None:
        binds += [(plan.socket_folder, INSIDE, "ro"), (inside_script(), f"{INSIDE}-inside.py", "ro")]
    for source, target, how in binds:
        if set(":,\\") & {*source, *target}:
            raise OSError(f"apptainer can't bind a path with a colon or comma: {source}")
        made += ["--bind", f"{source}:{target}:{how}"]
    return [*made, plan.image, *inner_command(plan, command, "python3")]
