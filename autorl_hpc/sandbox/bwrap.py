"""Level `bwrap`: bubblewrap with options of version 0.4. Needs user namespaces or bwrap's setuid bit."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from autorl_hpc.sandbox import sandbox_plan
from autorl_hpc.sandbox.sandbox_plan import DEVICES, HOST, SETTINGS, SandboxPlan, inner_command
from autorl_hpc.states import Network, SandboxLevel

name = SandboxLevel.BWRAP


def why_not(plan: SandboxPlan) -> str | None:
    """Return why this level can't be tried here; None if it can."""
    return None if shutil.which("bwrap") else "no bwrap here"


def known_holes(plan: SandboxPlan) -> tuple[str, ...]:
    """Return no holes beyond those that a trial finds."""
    return ()


def argv(plan: SandboxPlan, command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` inside."""
    made = [
        shutil.which("bwrap") or "bwrap", "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
        "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", HOST,
    ]  # fmt: skip
    if plan.network is not Network.OPEN:
        made.append("--unshare-net")
    made += ["--proc", "/proc", *_settings(), "--dev", "/dev", "--tmpfs", "/dev/shm", "--dir", "/run", "--dir", "/var"]
    for device in plan.devices:
        if os.path.dirname(device) != "/dev" or os.path.basename(device) not in DEVICES:
            made += ["--dev-bind", device, device]
    for step in sandbox_plan.steps(plan):
        if step.kind == "link":
            made += ["--symlink", step.source, step.target]
        elif step.kind == "empty":
            made += ["--tmpfs", step.target]
        else:
            made += ["--bind" if step.kind == "writable" else "--ro-bind", step.source, step.target]
    made += ["--symlink", "/tmp", "/var/tmp", "--setenv", "TMPDIR", "/tmp", "--chdir", plan.workspace]
    return [*made, "--", *inner_command(plan, command, sys.executable)]


def _settings() -> list[str]:
    """Bind the node's settings read-only: root can write them without capabilities, and `core_pattern` runs a program."""
    return [word for path in SETTINGS if os.path.exists(path) for word in ("--ro-bind", path, path)]
