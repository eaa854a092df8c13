"""Processes that have one address space together: until it execs, a child of vfork runs in its parent's, and all that is resident
there is shown for both of them. subprocess starts programs so, whatever the size of who starts them."""

from __future__ import annotations

import ctypes
import platform

KCMP = {"x86_64": 312, "aarch64": 272}
"""The number of kcmp(2) by machine."""

KCMP_VM = 1


def of_their_own(pids: set[int]) -> set[int]:
    """Those whose address space is no parent's among them. Where the kernel doesn't tell, all of them."""
    number = KCMP.get(platform.machine())
    if number is None:
        return pids
    syscall = ctypes.CDLL(None).syscall

    def is_shared(pid: int) -> bool:
        parent = _parent(pid)
        if parent not in pids:
            return False
        asked = (number, pid, parent, KCMP_VM, 0, 0)
        return bool(syscall(*(ctypes.c_long(value) for value in asked)) == 0)

    return {pid for pid in pids if not is_shared(pid)}


def _parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None
