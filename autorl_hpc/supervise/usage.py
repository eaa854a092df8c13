"""Memory, disk and processes of an agent, measured from outside, against its budget.

Measured and not limited by the kernel: RLIMIT_AS breaks CUDA, which maps far more than it uses, and RLIMIT_NPROC counts the user's
other jobs on the node. Where Slurm keeps a job's memory by a cgroup, that works as well, and faster than this.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autorl_hpc.records.experiment import Budget
from autorl_hpc.states import EndedBy
from autorl_hpc.supervise.folders import DIR_FLAGS
from autorl_hpc.supervise.processes import descendants, marked

GIB = 1024**3
LOOK_S = 2.0
DISK_LOOK_S = 10.0
DISK_SHARE = 0.02
"""Of the time, that walking a workspace may take: one of a million files is looked at less often."""

MAX_DEPTH = 200
"""Deeper folders can't be measured with the descriptors that a process has; no program nests them so."""

CLOSED = "folders that are closed to their own owner"
IN_MEMORY = ("tmpfs", "ramfs")
"""Kinds of file systems in memory. What lies in those that an agent's processes have of their own is nobody's resident memory."""

MEMFD = "/memfd:"
"""How /proc shows a file in memory without a name (memfd_create)."""


@dataclass(frozen=True)
class Excess:
    """What was used beyond the budget."""

    ended_by: EndedBy
    reason: str


class UsageWatch(threading.Thread):
    """Looks every few seconds until something is exceeded or it is told to end. A failure to measure is no excess."""

    def __init__(self, budget: Budget, keeper_pid: int, mark: str, workspace: Path, log: Path) -> None:
        super().__init__(name="usage", daemon=True)
        self.budget = budget
        self.keeper_pid = keeper_pid
        self.mark = mark
        self.workspace = workspace
        self.log = log
        self.excess: Excess | None = None
        self._ending = threading.Event()
        self._next_disk_look = 0.0

    @property
    def needed(self) -> bool:
        """Whether the budget limits anything that is measured here."""
        return any(limit is not None for limit in (self.budget.memory_gib, self.budget.disk_gib, self.budget.processes))

    def run(self) -> None:
        while self.needed and self.excess is None and not self._ending.wait(LOOK_S):
            try:
                self.excess = self._look()
            except OSError:
                continue

    def end(self) -> None:
        """Ends the watch."""
        self._ending.set()

    def _look(self) -> Excess | None:
        budget = self.budget
        pids = (descendants(self.keeper_pid) | marked(self.mark)) - {self.keeper_pid, os.getpid()}
        if budget.processes is not None and len(pids) > budget.processes:
            return Excess(EndedBy.PROCESSES, f"{len(pids)} processes at once, the budget has {budget.processes}")
        if budget.memory_gib is not None:
            used = memory_bytes(pids, budget.memory_gib * GIB)
            if used > budget.memory_gib * GIB:
                what = f"{used / GIB:.2f} GiB of memory at once, the budget has {budget.memory_gib:g}"
                return Excess(EndedBy.OUT_OF_MEMORY, what)
        return self._look_at_disk(pids)

    def _look_at_disk(self, pids: set[int]) -> Excess | None:
        limit = self.budget.disk_gib
        now = time.monotonic()
        if limit is None or now < self._next_disk_look:
            return None
        try:
            used = disk_bytes(self.workspace) + nameless_bytes(pids, os.stat(self.workspace).st_dev) + _size(self.log)
        except Unmeasurable as error:
            return Excess(EndedBy.DISK, f"{error}, which can't be measured")
        took_s = time.monotonic() - now
        self._next_disk_look = now + max(DISK_LOOK_S, took_s / DISK_SHARE)
        if used > limit * GIB:
            return Excess(EndedBy.DISK, f"{used / GIB:.2f} GiB of disk, the budget has {limit:g}")
        return None


class Unmeasurable(Exception):
    """A tree has more levels than MAX_DEPTH, or folders that their owner has closed."""


def memory_bytes(pids: set[int], enough: float) -> float:
    """Memory of some processes together. What several share is counted once, if counting it for each would be too much.

    Args:
        enough: a sum of resident sizes below this is good enough an answer: it costs much less to ask for.
    """
    resident = sum(_resident_bytes(pid) for pid in pids)
    in_files = sum(_file_system_bytes(pids)) + sum(_open_bytes(pids, lambda link, _: link.startswith(MEMFD)).values())
    if resident + in_files <= enough:
        return resident + in_files
    shared = [_proportional_bytes(pid) for pid in pids]
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


def disk_bytes(folder: Path) -> int:
    """Bytes that the files below a folder take on the disk. No link is followed; a file with several names counts once.

    Raises:
        Unmeasurable: it is nested too deeply, or some of it is closed.
        OSError: the folder itself can't be read.
    """
    seen: set[tuple[int, int]] = set()
    total = 0
    stack: list[tuple[int, list[str]]] = []

    def enter(fd: int) -> None:
        nonlocal total
        inner: list[str] = []
        with os.scandir(fd) as entries:
            for entry in entries:
                try:
                    info = entry.stat(follow_symlinks=False)
                except PermissionError:
                    raise Unmeasurable(CLOSED) from None
                except OSError:
                    continue
                if stat.S_ISDIR(info.st_mode):
                    inner.append(entry.name)
                elif info.st_nlink > 1:
                    if (info.st_dev, info.st_ino) in seen:
                        continue
                    seen.add((info.st_dev, info.st_ino))
                total += info.st_blocks * 512
        stack.append((fd, inner))

    try:
        enter(os.open(folder, DIR_FLAGS))
    except PermissionError:
        raise Unmeasurable(CLOSED) from None
    try:
        while stack:
            fd, inner = stack[-1]
            if not inner:
                os.close(stack.pop()[0])
                continue
            name = inner.pop()
            if len(stack) >= MAX_DEPTH:
                raise Unmeasurable(f"folders nested deeper than {MAX_DEPTH}")
            try:
                below = os.open(name, DIR_FLAGS, dir_fd=fd)
            except PermissionError:
                raise Unmeasurable(CLOSED) from None
            except OSError:
                continue
            try:
                enter(below)
            except (OSError, Unmeasurable) as error:
                os.close(below)
                if isinstance(error, Unmeasurable):
                    raise
    finally:
        for fd, _ in stack:
            os.close(fd)
    return total


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
