"""Pieces of agent.log by budget time, and the run's events: bounded looks into files that may be huge, or gone."""

from __future__ import annotations

import json
import math
import os
import stat
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autorl_hpc.report.failures.facts import LogExcerpt

MAX_EXCERPT_BYTES = 8 * 1024
"""The end of what an agent wrote in one iteration: a traceback stands there."""

MAX_TIMES_BYTES = 8 * 1024 * 1024
MAX_EVENTS_BYTES = 4 * 1024 * 1024


def read_part(path: Path, offset: int, count: int) -> bytes:
    """At most `count` bytes from `offset` on; nothing where it can't be read. Links and pipes are not followed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, count, offset) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    except OSError:
        return b""
    finally:
        os.close(descriptor)


class AgentLog:
    """agent.log with the times at which it had been written."""

    def __init__(self, log: Path, times: Path) -> None:
        self._log = log
        self._bytes: list[int] = []
        self._elapsed: list[float] = []
        for line in read_part(times, 0, MAX_TIMES_BYTES).split(b"\n"):
            byte, _, rest = line.partition(b" ")
            try:
                at, elapsed_s = int(byte), float(rest.partition(b" ")[0])
            except ValueError:
                continue
            if not math.isfinite(elapsed_s):
                continue
            if not self._bytes or (at >= self._bytes[-1] and elapsed_s >= self._elapsed[-1]):
                self._bytes.append(at)
                self._elapsed.append(elapsed_s)

    @property
    def is_timed(self) -> bool:
        """Whether it is known when what was written."""
        return bool(self._bytes)

    def size(self) -> int:
        """Bytes of the log; 0 where it is not there."""
        try:
            return os.lstat(self._log).st_size
        except OSError:
            return 0

    def written_by(self, elapsed_s: float) -> int:
        """The byte up to which the log was surely written at a time."""
        place = bisect_right(self._elapsed, elapsed_s)
        return self._bytes[place - 1] if place else 0

    def excerpt(self, begin_s: float, end_s: float) -> LogExcerpt | None:
        """The end of what was written in a stretch of time; None: nothing, or it is not known when."""
        begin, end = self.written_by(begin_s), self.written_by(end_s)
        return self._cut(begin, end) if self.is_timed else None

    def end(self) -> LogExcerpt | None:
        """The last lines."""
        return self._cut(0, self.size())

    def _cut(self, begin: int, end: int) -> LogExcerpt | None:
        start = max(begin, end - MAX_EXCERPT_BYTES)
        data = read_part(self._log, start, end - start) if end > start else b""
        if start > begin:  # in the middle of a line, and perhaps of a character
            first = data.find(b"\n") + 1
            start, data = start + first, data[first:]
        return LogExcerpt("agent.log", start, data.decode("utf-8", "replace")) if data else None


def read_events(path: Path) -> Sequence[dict[str, Any]]:
    """The lines of events.jsonl that can be read; none where there is no such file."""
    found = []
    for line in read_part(path, 0, MAX_EVENTS_BYTES).split(b"\n"):
        try:
            value = json.loads(line) if line else None
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and isinstance(value.get("event"), str):
            found.append(value)
    return found
