"""Follows a file that grows, a little at a time, and never far behind. It may be cut, replaced or 50 GB long."""

from __future__ import annotations

import os

PIECE_BYTES = 256 * 2**10
"""Read at once."""

MAX_BEHIND_BYTES = 64 * 2**20
RESUME_BEHIND_BYTES = 8 * 2**20
"""What is further behind goes on from here to the end; the bytes between are never read."""


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
        self._resuming = False

    def is_other(self, status: os.stat_result) -> bool:
        """Whether a file is longer than what was read of it, was cut, or is another one."""
        return self._file != (status.st_dev, status.st_ino) or self.offset != status.st_size

    def read(self, fd: int, *, jump: bool = True) -> bytes:
        """The next piece; empty at the end. A file that was cut or replaced begins anew.

        Args:
            jump: whether reading may go on nearer to the end.
        """
        info = os.fstat(fd)
        if self._file != (info.st_dev, info.st_ino) or info.st_size < self.offset:
            self._file, self.offset, self._resuming = (info.st_dev, info.st_ino), 0, False
        self.size = info.st_size
        if jump and self.size - self.offset > MAX_BEHIND_BYTES:
            self.skipped += self.size - RESUME_BEHIND_BYTES - self.offset
            self.offset, self._resuming = self.size - RESUME_BEHIND_BYTES, True
        return os.pread(fd, PIECE_BYTES, self.offset)

    def lines(self, fd: int, *, rest: bool = False) -> bytes:
        """The next whole lines, by newline or carriage return; a line longer than a piece is skipped.

        Args:
            rest: also a last line that has no end yet.
        """
        piece = self.read(fd)
        if not piece:
            return b""
        begin = max(piece.find(b"\n"), piece.find(b"\r")) + 1 if self._resuming else 0
        end = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1
        at_end = self.offset + len(piece) >= self.size
        if rest and at_end:
            end = len(piece)
        if end == 0:
            if len(piece) == PIECE_BYTES:
                self.offset, self._resuming = self.offset + len(piece), True
            return b""
        self.offset, self._resuming = self.offset + end, False
        return piece[begin:end]
