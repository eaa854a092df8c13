"""Sandbox levels, strongest first: each makes the command that runs an agent with nothing but its plan."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from autorl_hpc.sandbox import linux, sandbox_plan, seccomp
from autorl_hpc.sandbox.sandbox_plan import (
    DEVICES,
    HOST,
    INSIDE,
    SETTINGS,
    TORCH_PORTS,
    SandboxPlan,
    handed_out,
    inner_command,
    inside_script,
)
from autorl_hpc.states import Network, SandboxLevel


class Level(ABC):
    """One way to enforce an agent's plan."""

    name: SandboxLevel

    def why_not(self, plan: SandboxPlan) -> str | None:
        """Return why it can't be tried on this node; None if it can, which does not mean that it works."""
        return None

    def known_holes(self, plan: SandboxPlan) -> tuple[str, ...]:
        """Return what it can't stop by design, in addition to what a trial finds."""
        return ()

    @abstractmethod
    def argv(self, plan: SandboxPlan, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` inside. It holds no secrets; the environment is inherited."""


class Apptainer(Level):
    """The image of a run's environment, with its own software and nothing of the machine but the plan's folders."""

    name = SandboxLevel.APPTAINER

    def why_not(self, plan: SandboxPlan) -> str | None:
        if plan.image is None:
            return "the run's environment is no image"
        return None if _apptainer() else "no apptainer here"

    def argv(self, plan: SandboxPlan, command: Sequence[str]) -> list[str]:
        assert plan.image is not None
        made = [_apptainer() or "apptainer", "--silent", "exec", "--contain", "--pid", "--ipc", "--uts", "--no-home"]
        made += ["--no-privs", "--workdir", plan.tmp, "--pwd", plan.workspace, "--env", "TMPDIR=/tmp"]
        if any(os.path.basename(device).startswith("nvidia") for device in plan.devices):
            made.append("--nv")
        if plan.network is not Network.OPEN:
            made += ["--net", "--network", "none"]
        binds = [(plan.workspace, plan.workspace, "rw"), *((source, target, "ro") for source, target in plan.placed)]
        binds.append((inside_script(), f"{INSIDE}-inside.py", "ro"))
        if plan.socket_folder is not None:
            binds.append((plan.socket_folder, INSIDE, "ro"))
        for source, target, how in binds:
            if set(":,\\") & {*source, *target}:
                raise OSError(f"apptainer can't bind a path with a colon or comma: {source}")
            made += ["--bind", f"{source}:{target}:{how}"]
        return [*made, plan.image, *inner_command(plan, command, "python3")]


def _apptainer() -> str | None:
    return shutil.which("apptainer") or shutil.which("singularity")


class Bwrap(Level):
    """Bubblewrap with options of version 0.4. Needs user namespaces or bwrap's setuid bit."""

    name = SandboxLevel.BWRAP

    def why_not(self, plan: SandboxPlan) -> str | None:
        return None if shutil.which("bwrap") else "no bwrap here"

    def argv(self, plan: SandboxPlan, command: Sequence[str]) -> list[str]:
        made = [
            shutil.which("bwrap") or "bwrap", "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
            "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--hostname", HOST,
        ]  # fmt: skip
        if plan.network is not Network.OPEN:
            made.append("--unshare-net")
        made += ["--proc", "/proc"]
        for path in SETTINGS:  # root can write them without capabilities, and `core_pattern` runs a program
            made += ["--ro-bind", path, path] if os.path.exists(path) else []
        made += ["--dev", "/dev", "--tmpfs", "/dev/shm", "--dir", "/run", "--dir", "/var"]
        for device in plan.devices:
            if os.path.dirname(device) != "/dev" or os.path.basename(device) not in DEVICES:
                made += ["--dev-bind", device, device]
        for step in sandbox_plan.steps(plan):
            option = {"link": "--symlink", "empty": "--tmpfs", "writable": "--bind", "readable": "--ro-bind"}[step.kind]
            made += [option, *([] if step.kind == "empty" else [step.source]), step.target]
        made += ["--symlink", "/tmp", "/var/tmp", "--setenv", "TMPDIR", "/tmp", "--chdir", plan.workspace]
        return [*made, "--", *inner_command(plan, command, sys.executable)]


# --- `namespaces` and `landlock`: by system calls alone (enter.py), so they need no program and no privileges

WRITABLE_DEVICES = ("/dev/shm", "/dev/pts", "/dev/ptmx")


class Namespaces(Level):
    """User, mount, process, IPC and network namespaces without bwrap."""

    name = SandboxLevel.NAMESPACES

    def why_not(self, plan: SandboxPlan) -> str | None:
        return None if sys.platform == "linux" else "not Linux"

    def argv(self, plan: SandboxPlan, command: Sequence[str]) -> list[str]:
        # An empty folder as mount point. It stays empty outside, so all sandboxes share it.
        root = Path(tempfile.gettempdir()) / f"autorl-root-{os.getuid()}"
        root.mkdir(mode=0o700, exist_ok=True)
        return _enter(
            level="namespaces",
            root=str(root),
            host=HOST,
            settings=SETTINGS,
            open=plan.network is Network.OPEN,
            devices=plan.devices,
            steps=sandbox_plan.steps(plan),
            workspace=plan.workspace,
            command=inner_command(plan, command, sys.executable),
        )


class Landlock(Level):
    """Rules of the kernel's Landlock on this process and its children, for hosts without user namespaces."""

    name = SandboxLevel.LANDLOCK

    def why_not(self, plan: SandboxPlan) -> str | None:
        try:
            version = linux.version()
        except OSError as error:
            return f"no Landlock in this kernel: {error.strerror}"
        if plan.network is not Network.OPEN and version < 4:
            return f"Landlock of version {version} knows no network; Linux 6.7 does"
        if plan.network is not Network.OPEN and platform.machine() not in seccomp.ARCHITECTURES:
            return f"no list of system calls for {platform.machine()}"
        return None

    def known_holes(self, plan: SandboxPlan) -> tuple[str, ...]:
        """Return the holes; rules name ports, not addresses."""
        if plan.network is Network.OPEN:
            return ()
        free = handed_out()
        return (f"TCP leads out to ports {free[0]} to {free[-1]}, which NCCL and gloo need on the node itself",)

    def argv(self, plan: SandboxPlan, command: Sequence[str]) -> list[str]:
        spans = [(0, 0), *((port, port) for port, _ in plan.ways)]  # port 0 requests a free one
        spans += [(ports[0], ports[-1]) for ports in (TORCH_PORTS, handed_out())]
        return _enter(
            level="landlock",
            readable=plan.readable,
            hidden=[*plan.hidden, *plan.masked],
            placed=[source for source, _ in plan.placed],
            writable=[plan.workspace, plan.tmp, *plan.devices, *WRITABLE_DEVICES],
            ports=None if plan.network is Network.OPEN else spans,
            tmp=plan.tmp,
            workspace=plan.workspace,
            command=list(command),
        )


def _enter(**job: object) -> list[str]:
    # -B: with the agent's environment it would write compiled code into the frozen folder, which no hash covers.
    return [sys.executable, "-I", "-B", str(Path(__file__).with_name("enter.py")), json.dumps(job)]


class Nothing(Level):
    """Level `none`: the agent has all rights of the user."""

    name = SandboxLevel.NONE

    def why_not(self, plan: SandboxPlan) -> str | None:
        return None if plan.network is Network.OPEN else "nothing closes the network"

    def known_holes(self, plan: SandboxPlan) -> tuple[str, ...]:
        return ("everything that the user may do",)

    def argv(self, plan: SandboxPlan, command: Sequence[str]) -> list[str]:
        if shutil.which(command[0]) is None:  # whoever starts it is to see that the node lacks it
            return list(command)
        return inner_command(plan, ["env", f"TMPDIR={plan.tmp}", *command], sys.executable, inside_script())


LEVELS: tuple[Level, ...] = (Apptainer(), Bwrap(), Namespaces(), Landlock(), Nothing())


def level(name: SandboxLevel) -> Level:
    """Return the level of that name."""
    return next(each for each in LEVELS if each.name is name)
