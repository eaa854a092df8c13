"""Follows a file that grows, a little at a time, and never far behind. It may be cut, replaced or 50 GB long."""

from __future__ import annotations

import os
import re

PIECE_BYTES = 256 * 2**10
"""Read at once."""

MAX_BEHIND_BYTES = 64 * 2**20
RESUME_BEHIND_BYTES = 8 * 2**20
"""What is further behind goes on from here to the end; the bytes between are never read."""

HEAD_BYTES = 256
"""By which a file that was written anew, to at least its old length, is told from one that grew."""

MAX_OPEN_BYTES = 16 * 2**10
"""After an opening brace, that are waited for its closing one."""

_LINE_END = re.compile(rb"[\r\n]")


class Followed:
    """How far a file has been read. Its descriptor is the caller's, opened anew for each look: an agent may remove the file.

    Attributes:
        offset: all before is read.
        size: as it was seen last.
        skipped: bytes that were jumped over.
    """

    def __init__(self) -> None:
        self.offset = 0
        self.size = 0
        self.skipped = 0
        self._file: tuple[int, int] | None = None
        self._head = b""
        self._changed_ns = 0
        self._resuming = False

    def is_other(self, status: os.stat_result) -> bool:
        """Whether a file was written to since it was read, or is another one, or something of it is left."""
        seen = (self._file, self._changed_ns, self.offset)
        return seen != ((status.st_dev, status.st_ino), status.st_mtime_ns, status.st_size)

    def read(self, fd: int, *, jump: bool = True) -> bytes:
        """The next piece; empty at the end. A file that was cut, replaced or begun anew is read anew.

        Args:
            jump: whether reading may go on nearer to the end.
        """
        info = os.fstat(fd)
        head = os.pread(fd, HEAD_BYTES, 0) if self._changed_ns != info.st_mtime_ns else self._head
        if self._file != (info.st_dev, info.st_ino) or info.st_size < self.offset or not head.startswith(self._head):
            self.offset, self._resuming = 0, False
        self._file, self._head, self._changed_ns = (info.st_dev, info.st_ino), head, info.st_mtime_ns
        self.size = info.st_size
        if jump and self.size - self.offset > MAX_BEHIND_BYTES:
            self.skipped += self.size - RESUME_BEHIND_BYTES - self.offset
            self.offset, self._resuming = self.size - RESUME_BEHIND_BYTES, True
        return os.pread(fd, PIECE_BYTES, self.offset)

    def lines(self, fd: int, *, rest: bool = False) -> bytes:
        """The next whole lines, by newline or carriage return; a line longer than a piece is skipped. They don't end inside
        braces: rich breaks a dictionary into several lines.

        Args:
            rest: also a last line that has no end yet.
        """
        piece = self.read(fd)
        if not piece:
            return b""
        first = _LINE_END.search(piece) if self._resuming else None
        begin = first.end() if first is not None else 0
        end = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1
        at_end = self.offset + len(piece) >= self.size
        if rest and at_end:
            end = len(piece)
        if end == 0:
            if len(piece) == PIECE_BYTES:
                self.offset, self._resuming = self.offset + len(piece), True
            return b""
        if not (rest and at_end):
            end = self._before_open_brace(piece, begin, end)
        self.offset, self._resuming = self.offset + end, False
        return piece[begin:end]

    @staticmethod
    def _before_open_brace(piece: bytes, begin: int, end: int) -> int:
        opening = piece.rfind(b"{", begin, end)
        waits = opening >= 0 and end - opening < MAX_OPEN_BYTES and b"}" not in piece[opening:end]
        # With a whole piece behind the brace, waiting would never end.
        return opening if waits and (opening > 0 or len(piece) < PIECE_BYTES) else end
