"""Pieces of agent.log by budget time, and the run's events: bounded looks into files that may be huge, or gone."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from autorl_hpc.report.failures.facts import LogExcerpt

MAX_EXCERPT_BYTES = 8 * 1024
"""The end of what an agent wrote in one iteration: a traceback stands there."""

MAX_SCANNED_BYTES = 64 * 1024 * 1024
"""Of a log that are looked through for tracebacks; of a longer one, the first and the last half of it: a fraction of a second."""
SCAN_CHUNK_BYTES = 1024 * 1024
MAX_MARKS = 2_000
"""Of one kind in one log, half of them the first and half the last."""
MAX_TRACEBACKS = 20
"""Cut out for one stretch of time, the last ones."""
MAX_LEAD_BYTES = 200
"""Before a mark, in which its line begins, or what it is about is said."""

TRACEBACK = b"Traceback (most recent call last)"
EXAMPLES = b"Num examples = "
_EXAMPLES = re.compile(rb"Num examples = ([\d,]{1,15})\b")

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

    def excerpts(self, begin_s: float, end_s: float) -> tuple[LogExcerpt, ...]:
        """Of what was written in a stretch of time, its tracebacks and its end; none if it is not known when."""
        return self._parts(self.written_by(begin_s), self.written_by(end_s)) if self.is_timed else ()

    def whole(self) -> tuple[LogExcerpt, ...]:
        """The tracebacks of the log and its last lines."""
        return self._parts(0, self.size())

    def rows(self, begin_s: float, end_s: float) -> int | None:
        """Rows on which the last training of a stretch of time began, as transformers' trainers say it."""
        begin, end = self.written_by(begin_s), self.written_by(end_s)
        for mark in reversed(self._examples[bisect_left(self._examples, begin) : bisect_left(self._examples, end)]):
            before = read_part(self._log, max(0, mark - MAX_LEAD_BYTES), min(mark, MAX_LEAD_BYTES))
            match = _EXAMPLES.match(read_part(self._log, mark, 40))
            said = before.rpartition(b"*****")[0].lower()
            if match is not None and not (b"evaluation" in said or b"prediction" in said):
                return int(match[1].replace(b",", b"") or 0)
        return None

    @cached_property
    def _tracebacks(self) -> list[int]:
        return _marks(self._log, self.size(), TRACEBACK)

    @cached_property
    def _examples(self) -> list[int]:
        return _marks(self._log, self.size(), EXAMPLES)

    def _parts(self, begin: int, end: int) -> tuple[LogExcerpt, ...]:
        last = self._cut(begin, end)
        until = last.offset if last is not None else end
        marks = self._tracebacks[bisect_left(self._tracebacks, begin) : bisect_left(self._tracebacks, until)]
        found = [self._around(mark, until) for mark in marks[-MAX_TRACEBACKS:]]
        return (*found, last) if last is not None else tuple(found)

    def _around(self, mark: int, until: int) -> LogExcerpt:
        """A traceback, from the beginning of its line where that is near: a launcher's prefix stands there."""
        lead = read_part(self._log, max(0, mark - MAX_LEAD_BYTES), min(mark, MAX_LEAD_BYTES))
        start = mark - len(lead) + lead.rfind(b"\n") + 1 if b"\n" in lead or mark <= MAX_LEAD_BYTES else mark
        data = read_part(self._log, start, min(MAX_EXCERPT_BYTES, until - start))
        after = data.find(TRACEBACK, mark - start + len(TRACEBACK))  # the next one is cut out by itself
        text = (data if after < 0 else data[:after]).decode("utf-8", "replace")
        return LogExcerpt("agent.log", start, text, only_tracebacks=True)

    def _cut(self, begin: int, end: int) -> LogExcerpt | None:
        start = max(begin, end - MAX_EXCERPT_BYTES)
        data = read_part(self._log, start, end - start) if end > start else b""
        if start > begin:  # in the middle of a line, and perhaps of a character
            first = data.find(b"\n") + 1
            start, data = start + first, data[first:]
        return LogExcerpt("agent.log", start, data.decode("utf-8", "replace")) if data else None


def _marks(path: Path, size: int, mark: bytes) -> list[int]:
    """Where a word stands in a log, in order."""
    half = MAX_SCANNED_BYTES // 2
    parts = [(0, size)] if size <= MAX_SCANNED_BYTES else [(0, half), (size - half, size)]
    found: list[int] = []
    for begin, end in parts:
        for at in range(begin, end, SCAN_CHUNK_BYTES):
            count = min(SCAN_CHUNK_BYTES, end - at) + len(mark) - 1  # one that lies across two chunks is the first's
            data = read_part(path, at, count)
            place = data.find(mark)
            while place >= 0:
                found.append(at + place)
                place = data.find(mark, place + 1)
            if len(found) > MAX_MARKS:
                del found[MAX_MARKS // 2 : -MAX_MARKS // 2]
    return found


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
