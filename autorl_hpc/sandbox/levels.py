"""The levels, strongest first, behind one small Protocol."""

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

# Levels `namespaces` and `landlock`: by system calls alone (enter.py), so they need no program and no rights.

WRITABLE_DEVICES = ("/dev/shm", "/dev/pts", "/dev/ptmx")


class Namespaces:
    """User, mount, process, IPC and network namespaces, made by the suite itself: where there is no bwrap."""

    name = SandboxLevel.NAMESPACES

    def why_not(self, plan: SandboxPlan) -> str | None:
        """None: it can be tried."""
        return None if sys.platform == "linux" else "not Linux"

    def known_holes(self, plan: SandboxPlan) -> tuple[str, ...]:
        """None but those that are found by trying."""
        return ()

    def argv(self, plan: SandboxPlan, command: Sequence[str]) -> list[str]:
        """See the Protocol in levels.py."""
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
    """Rules on this process and its children, by the kernel's Landlock: where there are no user namespaces."""

    name = SandboxLevel.LANDLOCK

    def why_not(self, plan: SandboxPlan) -> str | None:
        """What of the plan this kernel's version can't do."""
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
        """Rules name ports and not addresses."""
        if plan.network is Network.OPEN:
            return ()
        free = handed_out()
        return (f"TCP leads out to ports {free[0]} to {free[-1]}, which NCCL and gloo need on the node itself",)

    def argv(self, plan: SandboxPlan, command: Sequence[str]) -> list[str]:
        """See the Protocol in levels.py."""
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
    """First and last port of each span that stays usable; 0 is what asks for a free one."""
    free = handed_out()
    return [(0, 0), *((port, port) for port, _ in plan.ways), (TORCH_PORTS[0], TORCH_PORTS[-1]), (free[0], free[-1])]


def _enter(job: dict[str, object]) -> list[str]:
    # -B: it has the agent's variables, and would leave compiled code in the frozen folder, which no hash covers.
    return [sys.executable, "-I", "-B", str(Path(__file__).with_name("enter.py")), json.dumps(job)]


def _mount_point() -> str:
    """An empty folder that every mount of the sandbox's own root is made on; it stays empty outside, so one serves all."""
    path = Path(tempfile.gettempdir()) / f"autorl-root-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    return str(path)


class Level(Protocol):
    """One way to keep an agent to its plan."""

    @property
    def name(self) -> SandboxLevel: ...

    def why_not(self, plan: SandboxPlan) -> str | None:
        """Why it can't even be tried on this node; None: it can, which doesn't say that it works."""
        ...

    def known_holes(self, plan: SandboxPlan) -> tuple[str, ...]:
        """What it does not stop by its very nature, beside what is found by trying."""
        ...

    def argv(self, plan: SandboxPlan, command: Sequence[str]) -> list[str]:
        """The command that runs `command` inside. No secret stands in it: the environment is handed on as it is."""
        ...


class Nothing:
    """Level `none`: the agent is the user."""

    name = SandboxLevel.NONE

    def why_not(self, plan: SandboxPlan) -> str | None:
        """None, unless the network is to be closed."""
        return None if plan.network is Network.OPEN else "nothing closes the network"

    def known_holes(self, plan: SandboxPlan) -> tuple[str, ...]:
        """Everything."""
        return ("everything that the user may do",)

    def argv(self, plan: SandboxPlan, command: Sequence[str]) -> list[str]:
        """The command itself."""
        return list(command)


LEVELS: tuple[Level, ...] = (apptainer, bwrap, Namespaces(), Landlock(), Nothing())


def level(name: SandboxLevel) -> Level:
    """The level of that name."""
    return next(each for each in LEVELS if each.name is name)
