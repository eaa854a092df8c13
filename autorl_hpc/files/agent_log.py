"""Reads an agent's log by line, with the time at which each was written. The log is the agent's: anything may stand in it.

An agent holds the descriptor of its log. It can't reach the file by name from a sandbox, but it can cut it (ftruncate), also
to a length beyond its end. Stamps are the recorder's; they may be cut by a crash or be missing.
"""

from __future__ import annotations

import math
import os
import re
import stat
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_BYTES = 64 * 2**20
"""Of a log, that are read at once unless more is asked for."""

MAX_LINE_BYTES = 16 * 2**10
"""What a line has beyond is skipped."""

MAX_TIMES_BYTES = 17 * 2**20
"""Somewhat more than the recorder writes."""

CHUNK_BYTES = 2**20
FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)?|[ -/]{0,8}[0-~]?)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Line:
    """One line of the log.

    Attributes:
        offset: byte at which it begins.
        elapsed_s: budget used by the time it stood there whole, None where no stamp says so.
        text: as a terminal would show it, without its newline: the last state of a progress bar, no escapes. Still the agent's
            words: clean it before it is shown.
        cut: it was longer.
    """

    offset: int
    elapsed_s: float | None
    text: str
    cut: bool = False


class Times:
    """When which byte of the log had been written."""

    def __init__(self, stamps: list[tuple[int, float]]) -> None:
        self._bytes = [byte for byte, _ in stamps]
        self._elapsed = [elapsed_s for _, elapsed_s in stamps]

    def at(self, byte: int) -> float | None:
        """Budget used when everything before `byte` had been written; None if no stamp came after it."""
        place = bisect_left(self._bytes, byte)
        return self._elapsed[place] if place < len(self._elapsed) else None


def read_times(path: Path) -> Times:
    """The stamps that hold for the log as it is now. Damaged lines are skipped; no file is no stamps."""
    stamps: list[tuple[int, float]] = []
    for line in _bounded(path, MAX_TIMES_BYTES).split(b"\n"):
        fields = line.split(b" ", 2)
        try:
            byte, elapsed_s = int(fields[0]), float(fields[1])
        except (ValueError, IndexError):
            continue
        if len(fields) < 3 or byte < 0 or not math.isfinite(elapsed_s) or elapsed_s < 0:
            continue
        while stamps and stamps[-1][0] > byte:  # the log was cut: what was beyond is gone
            stamps.pop()
        if not stamps or byte > stamps[-1][0]:
            stamps.append((byte, elapsed_s))
    return Times(stamps)


def lines(
    log: Path,
    times: Path | None = None,
    *,
    start: int = 0,
    max_bytes: int = MAX_BYTES,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Iterator[Line]:
    """The lines that begin in the `max_bytes` bytes from `start` on; a log that is not there has none.

    Args:
        start: byte; inside a line, reading begins with the next one. See `tail_start`.
        max_line_bytes: of a line, what is read. Memory stays below this and a chunk, whatever the log is.

    Raises:
        OSError: the log can't be read.
    """
    stamps = read_times(times) if times is not None else Times([])
    for offset, end, data, cut in _raw_lines(log, start, max_bytes, max_line_bytes):
        yield Line(offset, stamps.at(end), shown(data), cut)


def tail_start(log: Path, max_bytes: int) -> int:
    """Where the last `max_bytes` bytes of a log begin; 0 if it has no more, or is not there."""
    try:
        return max(0, os.stat(log, follow_symlinks=False).st_size - max_bytes)
    except OSError:
        return 0


def shown(data: bytes) -> str:
    """A line's text as a terminal would leave it: what follows the last carriage return that something follows."""
    text = without_escapes(data.decode("utf-8", "replace"))
    states = [state for state in text.split("\r") if state.strip("\x00 ")]
    return _CONTROL.sub("", states[-1]).rstrip() if states else ""


def without_escapes(text: str) -> str:
    """`text` without colours, cursor movements, titles and links of terminals."""
    return _ESCAPE.sub("", text) if "\x1b" in text else text


def open_plain(path: Path) -> int | None:
    """A descriptor of a plain file; None if there is none, or something else that could make a reader wait."""
    try:
        fd = os.open(path, FLAGS)
    except OSError as error:
        if isinstance(error, FileNotFoundError) or os.path.islink(path):
            return None
        raise
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def _raw_lines(log: Path, start: int, max_bytes: int, max_line_bytes: int) -> Iterator[tuple[int, int, bytes, bool]]:
    """(first byte, byte behind it, data without newline, whether it was cut) of each line."""
    fd = open_plain(log)
    if fd is None:
        return
    try:
        at, held, dropped = start, b"", 0
        skipping = start > 0 and os.pread(fd, 1, start - 1) != b"\n"
        while at < start + max_bytes:
            chunk = os.pread(fd, min(CHUNK_BYTES, start + max_bytes - at), at)
            if not chunk:
                break
            begin = 0
            while (end := chunk.find(b"\n", begin)) >= 0:
                data = held + chunk[begin : min(end, begin + max_line_bytes)]
                whole = len(held) + dropped + end - begin
                if not skipping:
                    yield at + end - whole, at + end + 1, data[:max_line_bytes], whole > max_line_bytes
                held, dropped, skipping, begin = b"", 0, False, end + 1
            rest = len(chunk) - begin
            kept = chunk[begin : begin + max(0, max_line_bytes - len(held))]
            held, dropped = held + kept, dropped + rest - len(kept)
            at += len(chunk)
        if (held or dropped) and not skipping:
            yield at - len(held) - dropped, at, held, dropped > 0 or bool(os.pread(fd, 1, at))
    finally:
        os.close(fd)


def _bounded(path: Path, max_bytes: int) -> bytes:
    try:
        fd = open_plain(path)
    except OSError:
        return b""
    if fd is None:
        return b""
    with os.fdopen(fd, "rb") as file:
        try:
            return file.read(max_bytes)
        except OSError:
            return b""
