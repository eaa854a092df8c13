"""Measure an agent's memory, processes and disk against its budget. The kernel can't limit them: RLIMIT_AS breaks CUDA, which maps far
more than it uses, and RLIMIT_NPROC counts the user's other jobs on the node."""

from __future__ import annotations

import os
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from autorl_hpc.files.processes import descendants, marked, memory_bytes, nameless_bytes
from autorl_hpc.files.safe_open import DIR_FLAGS
from autorl_hpc.records.experiment import Budget
from autorl_hpc.states import EndedBy

MAX_DEPTH = 200


class Unmeasurable(Exception):
    """A tree is nested too deeply, or holds folders that their owner can't read."""


def disk_bytes(folder: Path) -> int:
    """Return the bytes that the files below a folder take on disk, following no link, hard links once. Raises Unmeasurable: it is nested
    too deeply, or some can't be read; OSError: the folder itself can't."""

    def unreadable(error: OSError) -> None:
        if isinstance(error, PermissionError):
            raise Unmeasurable("folders that are closed to their own owner")

    os.close(os.open(folder, DIR_FLAGS))
    total, seen = 0, set()
    for parent, folders, files in os.walk(folder, onerror=unreadable):
        if parent.count("/") > MAX_DEPTH:
            raise Unmeasurable(f"folders nested deeper than {MAX_DEPTH}")
        for name in (*folders, *files):
            try:
                info = os.lstat(os.path.join(parent, name))
            except OSError as error:
                unreadable(error)
                continue  # it was removed
            if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
                if (info.st_dev, info.st_ino) in seen:
                    continue
                seen.add((info.st_dev, info.st_ino))
            total += info.st_blocks * 512
    return total


GIB = 1024**3
LOOK_S, DISK_LOOK_S = 2.0, 10.0
DISK_SHARE = 0.02  # largest share of time spent on walking a workspace; one with a million files is measured less often


@dataclass(frozen=True)
class Excess:
    """What exceeded the budget."""

    ended_by: EndedBy
    reason: str


class UsageWatch(threading.Thread):
    """Thread that measures every few seconds until a limit is exceeded or `end` is called. A failed measurement is skipped."""

    def __init__(self, budget: Budget, keeper_pid: int, mark: str, workspace: Path, log: Path) -> None:
        super().__init__(name="usage", daemon=True)
        self.budget, self.keeper_pid, self.mark, self.workspace, self.log = budget, keeper_pid, mark, workspace, log
        self.excess: Excess | None = None
        self._ending = threading.Event()
        self._next_disk_look = 0.0

    def run(self) -> None:
        limits = (self.budget.memory_gib, self.budget.disk_gib, self.budget.processes)
        if limits == (None, None, None):
            return
        while self.excess is None and not self._ending.wait(LOOK_S):
            try:
                self.excess = self._look()
            except OSError:
                continue

    def end(self) -> None:
        self._ending.set()

    def _look(self) -> Excess | None:
        budget = self.budget
        pids = (descendants(self.keeper_pid) | marked(self.mark)) - {self.keeper_pid, os.getpid()}
        if budget.processes is not None and len(pids) > budget.processes:
            return Excess(EndedBy.PROCESSES, f"{len(pids)} processes at once, the budget has {budget.processes}")
        if budget.memory_gib is not None:
            limit = budget.memory_gib * GIB
            used = memory_bytes(pids, limit)
            if used > limit:
                what = f"{used / GIB:.2f} GiB of memory at once, the budget has {budget.memory_gib:g}"
                return Excess(EndedBy.OUT_OF_MEMORY, what)
        return self._look_at_disk(pids)

    def _look_at_disk(self, pids: set[int]) -> Excess | None:
        limit, now = self.budget.disk_gib, time.monotonic()
        if limit is None or now < self._next_disk_look:
            return None
        try:
            used = disk_bytes(self.workspace) + nameless_bytes(pids, os.stat(self.workspace).st_dev)
        except Unmeasurable as error:
            return Excess(EndedBy.DISK, f"{error}, which can't be measured")
        if self.log.exists():
            used += self.log.stat().st_size
        self._next_disk_look = now + max(DISK_LOOK_S, (time.monotonic() - now) / DISK_SHARE)
        if used > limit * GIB:
            return Excess(EndedBy.DISK, f"{used / GIB:.2f} GiB of disk, the budget has {limit:g}")
        return None
