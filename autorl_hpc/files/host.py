"""Which host, boot and job this process is."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36


def boot_id() -> str | None:
    """Tells one boot of a host from another."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def host_name() -> str:
    """The node's name. Slurm's own name first: several nodes may share a host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def deny_inspection() -> None:
    """Keeps other processes of the same ordinary user from reading this one's memory and environment in /proc."""
    prctl(PR_SET_DUMPABLE, 0)


def die_with_parent(number: int) -> bool:
    """The kernel sends this process a signal when the thread that started it is gone; False where it can't."""
    return prctl(PR_SET_PDEATHSIG, number)


def become_subreaper() -> bool:
    """Makes orphaned descendants children of this process; False where the kernel refuses."""
    return prctl(PR_SET_CHILD_SUBREAPER, 1)


def prctl(option: int, value: int) -> bool:
    """Sets one option of this process; False where the kernel refuses, or there is no Linux."""
    try:
        return bool(ctypes.CDLL(None, use_errno=True).prctl(option, int(value), 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def end_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends, however it ends. The caller looks afterwards whether
    its parent is still there."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    except (OSError, AttributeError):
        pass


def job_id() -> str | None:
    """The scheduler's id of this job."""
    return os.environ.get("SLURM_JOB_ID") or os.environ.get("SUBMITIT_LOCAL_JOB_ID")
