"""When the agent wrote what: stamps of its log's size. The agent writes into the log itself, so nothing stands in its way."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from autorl_hpc.recorder.watch import Moment

LOOK_S = 0.5
"""Resolution of the stamps. People and reports ask for seconds."""

RESOLUTIONS = ((8 * 2**20, LOOK_S), (12 * 2**20, 2.0), (16 * 2**20, 30.0))
"""(size of the file of stamps, seconds between two below it). Output without a pause is stamped for about 24 hours by LOOK_S,
for 48 more every 2 s, for 700 more every 30 s; then no more."""

TAIL_BYTES = 4096


class OutputStamps:
    """Appends `<byte> <elapsed_s> <at>` whenever the log's size has changed: up to this byte it was written by then.

    A byte smaller than that of the line before says that the log was truncated: who holds its descriptor can do that.
    """

    name = "output"

    def __init__(self, log: Path, times: Path) -> None:
        self.log = log
        self.every_s = LOOK_S
        times.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(times, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._written = os.fstat(self._fd).st_size
        self._last = self._mend()

    def look(self, now: Moment) -> None:
        """Writes a stamp if the log's size has changed."""
        try:
            info = os.stat(self.log, follow_symlinks=False)
        except FileNotFoundError:
            return
        if not stat.S_ISREG(info.st_mode) or info.st_size == self._last:
            return
        every_s = next((every_s for limit, every_s in RESOLUTIONS if self._written < limit), None)
        if every_s is None:
            return
        self.every_s = every_s
        self._write(f"{info.st_size} {now.elapsed_s:.2f} {now.at}\n".encode())
        self._last = info.st_size

    def close(self, now: Moment) -> None:
        """The last stamp."""
        try:
            self.look(now)
        finally:
            os.close(self._fd)

    def _write(self, line: bytes) -> None:
        os.write(self._fd, line)
        self._written += len(line)

    def _mend(self) -> int:
        """Ends a line that an earlier recorder left half written; returns the size that its last stamp names."""
        tail = os.pread(self._fd, TAIL_BYTES, max(0, self._written - TAIL_BYTES))
        if tail and not tail.endswith(b"\n"):
            self._write(b"\n")
        fields = (tail[: tail.rfind(b"\n") + 1].splitlines() or [b""])[-1].split()
        return int(fields[0]) if fields and fields[0].isdigit() else 0
