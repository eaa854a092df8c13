"""Find agents' traces in output: which format a line or document is in, objects among other output, and when it was written."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from autorl_hpc.files.safe_open import open_plain
from autorl_hpc.recorder.traces import claude_code, codex, gemini_cli, mini, opencode, openhands
from autorl_hpc.recorder.traces.parse import Event, Table, parsed
from autorl_hpc.recorder.watch import GrowingFile

# In the order in which they are tried: formats that are recognised only by their own fields come first.
LINE_FORMATS = (claude_code, opencode, gemini_cli, mini, codex, openhands)
FORMATS = tuple(each.FORMAT for each in LINE_FORMATS)


def read_line(value: Table, only: str | None) -> tuple[str, list[Event]] | None:
    """Return the format and the events of an object; None if it is in no format, or not in the one wanted."""
    for each in LINE_FORMATS:
        if only in (None, each.FORMAT) and each.knows(value):
            return each.FORMAT, each.read(value)
    return None


class TraceDocument(NamedTuple):
    format: str
    session: str | None
    messages: list[Any]
    read: Callable[[Table], list[Event]]
    totals: list[Event]


def read_document(value: Any, only: str | None) -> TraceDocument | None:
    """Parse a trajectory or a state file; None if it is neither."""
    if only in (None, mini.FORMAT) and mini.is_document(value):
        session, totals = mini.session(value), mini.read_totals(value)
        return TraceDocument(mini.FORMAT, session, value["messages"], mini.read_message, totals)
    if only in (None, openhands.FORMAT) and openhands.is_state(value):
        return TraceDocument(openhands.FORMAT, None, [], openhands.read, openhands.read_state(value))
    return None


# --- JSON in a growing log, among whatever else programs print

# Longest line or object: a tool's result can hold a big output. Parsing this much takes 50 ms and at worst 100 MB.
PIECE_BYTES = 4 * 2**20
# Number of braces in a line that are tried as the start of the object, because a prefix may contain braces too.
MAX_STARTS = 3
_MARKS = (b'"type"', b'"kind"')  # every line of a trace contains one of these; other lines are not parsed
_ANSI = re.compile(rb"\x1b\[[0-?]{0,64}[ -/]{0,8}[@-~]")
_BLOCK_END = re.compile(rb"^[{}].*$", re.MULTILINE)  # inside an object printed over many lines, all lines are indented


def objects_in(log: GrowingFile, fd: int, max_s: float, *, last: bool) -> Iterator[tuple[int, Table]]:
    """Yield (first byte, object) for each object that was added, for `max_s` seconds; `log.offset` is then behind its line."""
    deadline = time.monotonic() + max_s
    while True:
        before = base = log.offset
        data = log.piece(fd, PIECE_BYTES, last=last)
        at = 0
        while (brace := data.find(b"{", at)) >= 0:
            begin, end = max(at, data.rfind(b"\n", at, brace) + 1), data.find(b"\n", brace)
            end = len(data) if end < 0 else end
            if data[begin:end].rstrip() == b"{":
                closing = _BLOCK_END.search(data, end)
                if closing is None and not last and (begin > 0 or os.fstat(fd).st_size - base < PIECE_BYTES):
                    data = data[:begin]  # the rest is not written or not read yet
                    break
                end = end if closing is None or closing[0].rstrip() != b"}" else closing.end()
            value = _object_in(data[begin:end])
            at = end + 1
            if value is not None:
                log.offset = base + min(at, len(data))
                yield base + begin, value
            if time.monotonic() > deadline:
                log.offset = base + min(at, len(data))
                return
        if data:
            log.offset = base + len(data)
        if log.offset == before or time.monotonic() > deadline:
            return


def _object_in(line: bytes) -> Table | None:
    if not line.startswith((b"{\n", b"{\r\n")) and not any(mark in line for mark in _MARKS):
        return None
    text = _ANSI.sub(b"", line).decode("utf-8", "replace")
    for brace in itertools.islice(re.finditer("{", text), MAX_STARTS):
        value = parsed(text, brace.start())
        if isinstance(value, dict) and value:
            return value
    return None


class OutputTimes:
    """When the bytes of agent.log were written, from agent.times."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, GrowingFile()
        self._stamps: deque[tuple[int, float, str]] = deque()

    def of(self, offset: int) -> tuple[float, str] | None:
        """Return (elapsed_s, wall clock) at which the byte at `offset` was written; None if no stamp covers it yet. Offsets
        must increase."""
        while self._stamps or self._more():
            while self._stamps:
                upto, elapsed_s, at = self._stamps[0]
                if upto > offset:
                    return elapsed_s, at
                self._stamps.popleft()
        return None

    def _more(self) -> bool:
        fd = open_plain(self._path)
        if fd is None:
            return False
        try:
            data = self._file.piece(fd, 2**20)
        finally:
            os.close(fd)
        self._file.offset += len(data)
        for line in data.splitlines():
            try:
                upto, elapsed_s, at = line.decode("ascii").split()
                self._stamps.append((int(upto), max(0.0, float(elapsed_s)), at))
            except ValueError:
                continue
        return bool(data)
