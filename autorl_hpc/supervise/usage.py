"""Memory, disk and processes of an agent, measured from outside, against its budget.

Measured and not limited by the kernel: RLIMIT_AS breaks CUDA, which maps far more than it uses, and RLIMIT_NPROC counts the user's
other jobs on the node. Where Slurm keeps a job's memory by a cgroup, that works as well, and faster than this.
"""

from __future__ import annotations

import os
import stat
import threading
import time
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

TMPFS = ("dev/shm",)
"""In-memory file systems that a sandbox has of its own; what lies in them is nobody's resident memory."""


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
        return self._look_at_disk()

    def _look_at_disk(self) -> Excess | None:
        limit = self.budget.disk_gib
        now = time.monotonic()
        if limit is None or now < self._next_disk_look:
            return None
        try:
            used = disk_bytes(self.workspace) + _size(self.log)
        except TooDeep:
            return Excess(EndedBy.DISK, f"folders nested deeper than {MAX_DEPTH}, which can't be measured")
        took_s = time.monotonic() - now
        self._next_disk_look = now + max(DISK_LOOK_S, took_s / DISK_SHARE)
        if used > limit * GIB:
            return Excess(EndedBy.DISK, f"{used / GIB:.2f} GiB of disk, the budget has {limit:g}")
        return None


class TooDeep(Exception):
    """A tree has more levels than MAX_DEPTH."""


def memory_bytes(pids: set[int], enough: float) -> float:
    """Memory of some processes together. What several share is counted once, if counting it for each would be too much.

    Args:
        enough: a sum of resident sizes below this is good enough an answer: it costs much less to ask for.
    """
    resident = sum(_resident_bytes(pid) for pid in pids)
    in_files = sum(_tmpfs_bytes(pids))
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


def _tmpfs_bytes(pids: set[int]) -> list[int]:
    """Bytes in each sandbox's own in-memory file systems."""
    found: dict[int, int] = {}
    try:
        outer = {os.stat(f"/{name}").st_dev for name in TMPFS}
    except OSError:
        outer = set()
    for pid in pids:
        for name in TMPFS:
            try:
                inside = os.path.join("/proc", str(pid), "root", name)
                device = os.stat(inside).st_dev
                if device in outer or device in found:
                    continue
                info = os.statvfs(inside)
            except OSError:
                continue
            found[device] = (info.f_blocks - info.f_bfree) * info.f_frsize
    return list(found.values())


def disk_bytes(folder: Path) -> int:
    """Bytes that the files below a folder take on the disk. No link is followed; a file with several names counts once.

    Raises:
        TooDeep: it is nested too deeply to be measured.
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

    enter(os.open(folder, DIR_FLAGS))
    try:
        while stack:
            fd, inner = stack[-1]
            if not inner:
                os.close(stack.pop()[0])
                continue
            name = inner.pop()
            if len(stack) >= MAX_DEPTH:
                raise TooDeep
            try:
                below = os.open(name, DIR_FLAGS, dir_fd=fd)
            except OSError:
                continue
            try:
                enter(below)
            except OSError:
                os.close(below)
    finally:
        for fd, _ in stack:
            os.close(fd)
    return total


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
