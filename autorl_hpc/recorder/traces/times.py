"""When a byte of agent.log was written, from agent.times: for a reader that comes later."""

from __future__ import annotations

import os
from pathlib import Path

CHUNK_BYTES = 256 * 1024


class OutputTimes:
    """Answers for offsets that only grow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        self._rest = b""
        self._stamps: list[tuple[int, float, str]] = []
        self._next = 0
        self._ended = False

    def look_again(self) -> None:
        """Stamps may have been added."""
        self._ended = False

    def of(self, offset: int) -> tuple[float, str] | None:
        """elapsed_s and wall clock by which the byte at `offset` was there; None if no stamp tells yet."""
        while True:
            while self._next < len(self._stamps):
                upto, elapsed_s, at = self._stamps[self._next]
                if upto > offset:
                    return elapsed_s, at
                self._next += 1
            if self._ended or not self._more():
                self._ended = True
                return None

    def _more(self) -> bool:
        """Reads on; False if nothing was added."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                data = os.pread(fd, CHUNK_BYTES, self._at)
            finally:
                os.close(fd)
        except OSError:
            return False
        if not data:
            return False
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._stamps, self._next = [stamp for line in lines if (stamp := _stamp(line)) is not None], 0
        return True


def _stamp(line: bytes) -> tuple[int, float, str] | None:
    try:
        upto, elapsed_s, at = line.decode("ascii").split()
        return int(upto), max(0.0, float(elapsed_s)), at
    except ValueError:
        return None
