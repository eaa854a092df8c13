"""Memory, disk and processes of an agent, measured from outside, against its budget.

Measured and not limited by the kernel: RLIMIT_AS breaks CUDA, which maps far more than it uses, and RLIMIT_NPROC counts the user's
other jobs on the node. Where Slurm keeps a job's memory by a cgroup, that works as well, and faster than this.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from autorl_hpc.files.memory import memory_bytes, nameless_bytes
from autorl_hpc.files.processes import descendants, marked
from autorl_hpc.records.experiment import Budget
from autorl_hpc.states import EndedBy
from autorl_hpc.supervise.disk import Unmeasurable, disk_bytes

GIB = 1024**3
LOOK_S = 2.0
DISK_LOOK_S = 10.0
DISK_SHARE = 0.02
"""Of the time, that walking a workspace may take: one of a million files is looked at less often."""


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


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
