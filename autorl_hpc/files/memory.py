"""Memory of processes, and bytes of files that only they still hold, measured from outside through /proc."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable

from autorl_hpc.files.address_spaces import of_their_own

IN_MEMORY = ("tmpfs", "ramfs")
"""Kinds of file systems in memory. What lies in those that an agent's processes have of their own is nobody's resident memory."""

MEMFD = "/memfd:"
"""How /proc shows a file in memory without a name (memfd_create)."""


def memory_bytes(pids: set[int], enough: float) -> float:
    """Memory of some processes together. What several share is counted once, if counting it for each would be too much.

    Args:
        enough: a sum of resident sizes below this is good enough an answer: it costs much less to ask for.
    """
    owners = of_their_own(pids)
    resident = sum(_resident_bytes(pid) for pid in owners)
    in_files = sum(_file_system_bytes(pids)) + sum(_open_bytes(pids, lambda link, _: link.startswith(MEMFD)).values())
    if resident + in_files <= enough:
        return resident + in_files
    shared = [_proportional_bytes(pid) for pid in owners]
    of_shm = sum(shm for _, shm in shared)
    return sum(everything for everything, _ in shared) - of_shm + max(of_shm, in_files)


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _proportional_bytes(pid: int) -> tuple[int, int]:
    """(memory with what is shared divided among those who share it, of that in shared files)."""
    found = {"Pss": 0, "Pss_Shmem": 0}
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                name, _, rest = line.decode("ascii", "replace").partition(":")
                if name in found:
                    found[name] = int(rest.split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return _resident_bytes(pid), 0
    return found["Pss"], found["Pss_Shmem"]


def _file_system_bytes(pids: set[int]) -> list[int]:
    """Bytes in each file system in memory that processes have of their own: a sandbox's /dev/shm, or one that they mounted."""
    outer = {device for device, _ in _mounted_in_memory("self")}
    found: dict[str, int] = {}
    seen: set[int] = set()
    for pid in pids:
        try:
            namespace = os.stat(f"/proc/{pid}/ns/mnt").st_ino
            mounts = _mounted_in_memory(str(pid)) if namespace not in seen else []
        except OSError:
            continue
        seen.add(namespace)
        for device, point in mounts:
            if device in outer:
                continue
            try:
                info = os.statvfs(f"/proc/{pid}/root{point}")
            except OSError:
                continue
            found[device] = max(found.get(device, 0), (info.f_blocks - info.f_bfree) * info.f_frsize)
    return list(found.values())


def _mounted_in_memory(pid: str) -> list[tuple[str, str]]:
    """(device, mount point) of the file systems in memory that a process sees; proc(5), mountinfo."""
    found = []
    with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            mount, _, kind = line.partition(" - ")
            if kind.split(" ", 1)[0] in IN_MEMORY:
                fields = mount.split(" ")
                found.append((fields[2], re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])))
    return found


def _open_bytes(pids: set[int], counts: Callable[[str, os.stat_result], bool]) -> dict[tuple[int, int], int]:
    """By file, bytes of the plain files that processes hold open and that count: what no walk through folders finds."""
    found: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for descriptor in descriptors:
            path = f"/proc/{pid}/fd/{descriptor}"
            try:
                link, info = os.readlink(path), os.stat(path)
            except OSError:
                continue
            if stat.S_ISREG(info.st_mode) and counts(link, info):
                found[info.st_dev, info.st_ino] = info.st_blocks * 512
    return found


def nameless_bytes(pids: set[int], device: int) -> int:
    """Bytes on the disk `device` of files that processes hold open though no folder has them any more."""
    return sum(_open_bytes(pids, lambda _, info: info.st_nlink == 0 and info.st_dev == device).values())
