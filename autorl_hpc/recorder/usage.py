"""What the agent's processes use, every few seconds: CPU, memory, processes, disk, GPUs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from autorl_hpc.files.memory import memory_bytes
from autorl_hpc.recorder.sweep import Sweep
from autorl_hpc.recorder.table import ProcessTable
from autorl_hpc.recorder.watch import Lines, Moment
from autorl_hpc.records.recorded import GpuSample, UsageSample

LOOK_S = 5.0
LATER_LOOK_S = 60.0
MAX_BYTES = 64 * 2**20
"""Of usage.jsonl; from half of it on, samples come every LATER_LOOK_S. One with eight GPUs has about 1,300 bytes: a day and a half
by LOOK_S, and two weeks more."""

TABLE_PATIENCE_S = 1.0
"""A table of processes younger than this serves."""

MEMORY_SHARE = 0.0005
"""Of a core. What processes share is counted once, which costs a millisecond for each large one; measured less often then, and the
last figure stands between."""

LATEST_MEMORY_S = 60.0


class Gpus(Protocol):
    """Who measures GPUs."""

    def samples(self) -> tuple[GpuSample, ...] | None:
        """One sample a GPU that the agent may use, since the last call. None: nobody knows yet, or can."""
        ...

    def trouble(self) -> str | None:
        """What went wrong; each trouble is told once."""
        ...

    def close(self) -> None:
        """Lets go."""
        ...


class Usage:
    """Writes a `UsageSample` every LOOK_S.

    Args:
        table: of the agent's processes; looked at by `Processes`, and here if that is late.
        sweep: which knows the workspace's size on the disk, as of the last walk that is done.
    """

    name = "usage"

    def __init__(self, table: ProcessTable, sweep: Sweep, gpus: Gpus, path: Path) -> None:
        self.table = table
        self.sweep = sweep
        self.gpus = gpus
        self.every_s = LOOK_S
        self._lines = Lines(path, MAX_BYTES)
        self._memory: int | None = None
        self._next_memory = 0.0

    def look(self, now: Moment) -> None:
        """Writes one sample; raises RuntimeError, after that, if a GPU could not be measured."""
        self._sample(now)
        if self._lines.size > MAX_BYTES // 2:
            self.every_s = LATER_LOOK_S
        if (trouble := self.gpus.trouble()) is not None:
            raise RuntimeError(trouble)

    def close(self, now: Moment) -> None:
        """The last sample."""
        try:
            self._sample(now, patience_s=0.0, last=True)
        finally:
            self.gpus.close()
            self._lines.close()

    def _sample(self, now: Moment, patience_s: float = TABLE_PATIENCE_S, *, last: bool = False) -> None:
        looked = self._look_at_processes(patience_s, last)
        sample = {
            **now.told(),
            "cpu_s": round(self.table.cpu_s, 2) if looked else None,
            "memory_bytes": self._measured_memory(self.table.living) if looked else None,
            "processes": self.table.count if looked else None,
            "disk_bytes": self.sweep.disk_bytes,
            "gpus": self.gpus.samples(),
        }
        self._lines.add(UsageSample.model_validate(sample))

    def _look_at_processes(self, patience_s: float, last: bool) -> bool:
        try:
            self.table.look(patience_s, last=last)
        except OSError:
            return False
        return True

    def _measured_memory(self, living: set[int]) -> int | None:
        if not living:
            return 0
        begun = time.monotonic()
        if begun >= self._next_memory:
            try:
                self._memory = int(memory_bytes(living, 0))
            except OSError:
                self._memory = None
            took_s = time.monotonic() - begun
            self._next_memory = begun + min(LATEST_MEMORY_S, took_s / MEMORY_SHARE)
        return self._memory
