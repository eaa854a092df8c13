"""Level `apptainer`: starts the image of a run's environment with nothing of the machine but the plan's folders."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from autorl_hpc.sandbox.sandbox_plan import INSIDE, SandboxPlan, inner_command, inside_script
from autorl_hpc.states import Network, SandboxLevel

name = SandboxLevel.APPTAINER


def program() -> str | None:
    """Return the path of Apptainer, or of Singularity, its older name."""
    return shutil.which("apptainer") or shutil.which("singularity")


def why_not(plan: SandboxPlan) -> str | None:
    """Return why this level can't be tried here; None if it can."""
    if plan.image is None:
        return "the run's environment is no image"
    return None if program() else "no apptainer here"


def known_holes(plan: SandboxPlan) -> tuple[str, ...]:
    """Return no holes beyond those that a trial finds."""
    return ()


def argv(plan: SandboxPlan, command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` in the image. Uses the image's own software, not the machine's."""
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
