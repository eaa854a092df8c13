"""Sandbox levels, strongest first, behind one Protocol; the levels `namespaces`, `landlock` and `none` are here."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from autorl_hpc.sandbox import apptainer, bwrap, linux, sandbox_plan
from autorl_hpc.sandbox.sandbox_plan import HOST, SETTINGS, TORCH_PORTS, SandboxPlan, handed_out, inner_command
from autorl_hpc.states import Network, SandboxLevel

# --- `namespaces` and `landlock`: by system calls alone (enter.py), so they need no program and no privileges

WRITABLE_DEVICES = ("/dev/shm", "/dev/pts", "/dev/ptmx")


class Namespaces:
    """User, mount, process, IPC and network namespaces without bwrap."""

    name = SandboxLevel.NAMESPACES

    def why_not(self, plan: SandboxPlan) -> str | None:
        """Return None if this level can be tried."""
        return None if sys.platform == "linux" else "not Linux"

    def known_holes(self, plan: SandboxPlan) -> tuple[str, ...]:
        """Return no holes beyond those that a trial finds."""
        return ()

    def argv(self, plan: SandboxPlan, command: Sequence[str]) -> list[str]:
        """See the Protocol `Level`."""
        job: dict[str, object] = {
            "level": "namespaces",
            "root": _mount_point(),
            "host": HOST,
            "settings": list(SETTINGS),
            "open": plan.network is Network.OPEN,
            "devices": list(plan.devices),
            "steps": sandbox_plan.steps(plan),
            "workspace": plan.workspace,
            "command": inner_command(plan, command, sys.executable),
        }
        return _enter(job)


class Landlock:
    """Rules of the kernel's Landlock on this process and its children, for hosts without user namespaces."""

    name = SandboxLevel.LANDLOCK

    def why_not(self, plan: SandboxPlan) -> str | None:
        """Return what this kernel's Landlock can't do of the plan."""
        try:
            version = linux.version()
        except OSError as error:
            return f"no Landlock in this kernel: {error.strerror}"
        if plan.network is not Network.OPEN and version < 4:
            return f"Landlock of version {version} knows no network; Linux 6.7 does"
        if plan.network is not Network.OPEN and platform.machine() not in ("x86_64", "aarch64"):
            return f"no list of system calls for {platform.machine()}"
        return None

    def known_holes(self, plan: SandboxPlan) -> tuple[str, ...]:
        """Return the holes; rules name ports, not addresses."""
        if plan.network is Network.OPEN:
            return ()
        free = handed_out()
        return (f"TCP leads out to ports {free[0]} to {free[-1]}, which NCCL and gloo need on the node itself",)

    def argv(self, plan: SandboxPlan, command: Sequence[str]) -> list[str]:
        """See the Protocol `Level`."""
        job: dict[str, object] = {
            "level": "landlock",
            "readable": list(plan.readable),
            "hidden": [*plan.hidden, *plan.masked],
            "placed": [source for source, _ in plan.placed],
            "writable": [plan.workspace, plan.tmp, *plan.devices, *WRITABLE_DEVICES],
            "ports": None if plan.network is Network.OPEN else _spans(plan),
            "tmp": plan.tmp,
            "workspace": plan.workspace,
            "command": list(command),
        }
        return _enter(job)


def _spans(plan: SandboxPlan) -> list[tuple[int, int]]:
    """Return first and last port of each allowed span; port 0 requests a free port."""
    free = handed_out()
    return [(0, 0), *((port, port) for port, _ in plan.ways), (TORCH_PORTS[0], TORCH_PORTS[-1]), (free[0], free[-1])]


def _enter(job: dict[str, object]) -> list[str]:
    # -B: with the agent's environment it would write compiled code into the frozen folder, which no hash covers.
    return [sys.executable, "-I", "-B", str(Path(__file__).with_name("enter.py")), json.dumps(job)]


def _mount_point() -> str:
    """Return an empty folder as mount point of sandbox roots. It stays empty outside, so all sandboxes share it."""
    path = Path(tempfile.gettempdir()) / f"autorl-root-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    return str(path)


class Level(Protocol):
    """One way to enforce an agent's plan."""

    @property
    def name(self) -> SandboxLevel: ...

    def why_not(self, plan: SandboxPlan) -> str | None:
        """Return why it can't be tried on this node; None if it can, which does not mean that it works."""
        ...

    def known_holes(self, plan: SandboxPlan) -> tuple[str, ...]:
        """Return what it can't stop by design, in addition to what a trial finds."""
        ...

    def argv(self, plan: SandboxPlan, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` inside. It holds no secrets; the environment is inherited."""
        ...


class Nothing:
    """Level `none`: the agent has all rights of the user."""

    name = SandboxLevel.NONE

    def why_not(self, plan: SandboxPlan) -> str | None:
        """Return None, unless the network must be closed."""
        return None if plan.network is Network.OPEN else "nothing closes the network"

    def known_holes(self, plan: SandboxPlan) -> tuple[str, ...]:
        """Return everything."""
        return ("everything that the user may do",)

    def argv(self, plan: SandboxPlan, command: Sequence[str]) -> list[str]:
        """Return the command itself."""
        return list(command)


LEVELS: tuple[Level, ...] = (apptainer, bwrap, Namespaces(), Landlock(), Nothing())


def level(name: SandboxLevel) -> Level:
    """Return the level of that name."""
    return next(each for each in LEVELS if each.name is name)
