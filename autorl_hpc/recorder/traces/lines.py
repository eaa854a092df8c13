"""Follows a log that grows: its complete lines, those in JSON parsed, between whatever else a program prints."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autorl_hpc.recorder.traces.told import parsed

MAX_LINE_BYTES = 4 * 1024 * 1024
"""A tool's result can hold a big output; to parse this much takes some 50 ms and, at worst, 100 MB. Longer lines are counted."""

MAX_BLOCK_BYTES = 4 * 1024 * 1024
"""Of one object printed over many lines."""

CHUNK_BYTES = 1024 * 1024
MAX_STARTS = 3
"""A prefix may hold braces too: so many of them are tried as the beginning of the object."""

_MARKS = (b'"type"', b'"kind"', b'"msg"', b'"action"', b'"observation"')
"""What every line of a trace has: others are not parsed."""

_ANSI = re.compile(rb"\x1b\[[0-?]{0,64}[ -/]{0,8}[@-~]")
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(frozen=True)
class Parsed:
    """An object that stood in the log."""

    offset: int
    value: Any


class LogLines:
    """The log from `offset` on.

    Attributes:
        done: everything before this byte was read and need not be read again.
        ahead: so far it was read; between the two stands the beginning of a line or an object.
        skipped: lines too long to be read, so far.
        blocks: whether objects over many lines are looked for.
    """

    def __init__(self, path: Path, offset: int = 0, *, blocks: bool = True) -> None:
        self.path = path
        self.done = offset
        self.skipped = 0
        self.shrunk = 0
        self.blocks = blocks
        self.ahead = offset
        self._rest = bytearray()
        self._skipping = False
        self._block: bytearray | None = None
        self._block_at = 0

    def look(self, max_bytes: int, max_s: float) -> Iterator[Parsed]:
        """What was added, as far as bytes and time allow; the rest waits for the next look. Raises OSError."""
        try:
            fd = os.open(self.path, _OPEN_FLAGS)
        except FileNotFoundError:
            return
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return
            if status.st_size < self.ahead:
                self._begin_at(status.st_size)
            until, deadline = self.ahead + max_bytes, time.monotonic() + max_s
            while self.ahead < until:
                chunk = os.pread(fd, CHUNK_BYTES, self.ahead)
                if not chunk:
                    return
                yield from self._take(chunk, deadline)
                if time.monotonic() >= deadline:  # not before: a look that takes nothing is one that found nothing
                    return
        finally:
            os.close(fd)

    def finish(self) -> Iterator[Parsed]:
        """Nothing comes any more: what stands behind the last line's end is a line too."""
        if self._rest and not self._skipping:
            yield from self._line(bytes(self._rest), self.ahead - len(self._rest))
        self._begin_at(self.ahead, shrunk=False)

    def _begin_at(self, size: int, *, shrunk: bool = True) -> None:
        """If the log became shorter, what is left of it was read before: only what comes now is new."""
        self.shrunk += shrunk
        self.done = self.ahead = size
        self._rest.clear()
        self._skipping = False
        self._block = None

    def _take(self, chunk: bytes, deadline: float) -> Iterator[Parsed]:
        at = self.ahead - len(self._rest)
        self.ahead += len(chunk)
        if b"\n" not in chunk:
            self._keep(chunk)
            return
        data = bytes(self._rest) + chunk
        self._rest.clear()
        begin, last = 0, data.rfind(b"\n") + 1
        if self._skipping:
            self._skipping = False
            self.skipped += 1
            begin = data.find(b"\n") + 1
        objects, blocks = _Ahead(data, b'{"'), _Ahead(data, b"{\n", b"{\r\n")
        while begin < last:
            if self._block is None:
                found = min(objects.after(begin), blocks.after(begin) if self.blocks else last, last)
                if found == last:
                    break
                begin = max(begin, data.rfind(b"\n", begin, found) + 1)
            end = data.index(b"\n", begin)
            if end - begin > MAX_LINE_BYTES:
                self.skipped += 1
            else:
                yield from self._line(data[begin:end], at + begin)
            begin = end + 1
            if self._block is None:
                self.done = at + begin
            if time.monotonic() > deadline:  # a chunk of small lines takes seconds
                self.ahead = at + begin
                return
        if self._block is None:
            self.done = at + last
        self._keep(data[last:])

    def _keep(self, data: bytes) -> None:
        """The beginning of a line whose end has not come."""
        if self._skipping:
            return
        self._rest += data
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest.clear()
            self._skipping = True

    def _line(self, line: bytes, at: int) -> Iterator[Parsed]:
        if self._block is not None:
            if not line.startswith(b"{"):  # within an object printed over many lines, everything else is indented
                yield from self._in_block(line)
                return
            self._block = None
        if self.blocks and line.rstrip() == b"{":
            self._block, self._block_at = bytearray(b"{\n"), at
        elif any(mark in line for mark in _MARKS):
            value = object_in(line)
            if value is not None:
                yield Parsed(at, value)

    def _in_block(self, line: bytes) -> Iterator[Parsed]:
        assert self._block is not None
        self._block += line + b"\n"
        if line.rstrip() == b"}":
            value, self._block = parsed(self._block.decode("utf-8", "replace")), None
            if isinstance(value, dict):
                yield Parsed(self._block_at, value)
        elif len(self._block) > MAX_BLOCK_BYTES:
            self._block = None


class _Ahead:
    """Where the next of some patterns stands; what was found once is not looked for again."""

    def __init__(self, data: bytes, *patterns: bytes) -> None:
        self.data = data
        self.found = dict.fromkeys(patterns, -1)

    def after(self, begin: int) -> int:
        """The first place at or after `begin`; the data's length if there is none."""
        for pattern in self.found:
            if self.found[pattern] < begin:
                at = self.data.find(pattern, begin)
                self.found[pattern] = len(self.data) if at < 0 else at
        return min(self.found.values())


def object_in(line: bytes) -> dict[str, Any] | None:
    """The JSON object in a line, behind a prefix and before a suffix, terminal colours left out."""
    if b"\x1b" in line:
        line = _ANSI.sub(b"", line)
    text = line.decode("utf-8", "replace")
    at = -1
    for _ in range(MAX_STARTS):
        at = text.find("{", at + 1)
        if at < 0:
            return None
        value = parsed(text, at)
        if isinstance(value, dict) and value:
            return value
    return None
