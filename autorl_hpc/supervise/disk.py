"""How much disk a folder takes that belongs to an agent: by descriptors, following no link, whatever lies in it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from autorl_hpc.files.below import DIR_FLAGS

MAX_DEPTH = 200
"""Deeper folders can't be measured with the descriptors that a process has; no program nests them so."""

CLOSED = "folders that are closed to their own owner"


class Unmeasurable(Exception):
    """A tree has more levels than MAX_DEPTH, or folders that their owner has closed."""


def disk_bytes(folder: Path) -> int:
    """Bytes that the files below a folder take on the disk. A file with several names counts once.

    Raises:
        Unmeasurable: it is nested too deeply, or some of it is closed.
        OSError: the folder itself can't be read.
    """
    walk = _Walk()
    try:
        walk.enter(os.open(folder, DIR_FLAGS))
        while walk.stack:
            walk.step()
    except PermissionError:
        raise Unmeasurable(CLOSED) from None
    finally:
        for fd, _ in walk.stack:
            os.close(fd)
    return walk.total


class _Walk:
    """A walk in depth, which holds one descriptor a level."""

    def __init__(self) -> None:
        self.total = 0
        self.stack: list[tuple[int, list[str]]] = []
        self._seen: set[tuple[int, int]] = set()

    def enter(self, fd: int) -> None:
        """Counts what lies in a folder; those in it come later. The descriptor is closed if that fails."""
        inner: list[str] = []
        self.stack.append((fd, inner))
        with os.scandir(fd) as entries:
            for entry in entries:
                try:
                    info = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISDIR(info.st_mode):
                    inner.append(entry.name)
                elif info.st_nlink > 1:
                    if (info.st_dev, info.st_ino) in self._seen:
                        continue
                    self._seen.add((info.st_dev, info.st_ino))
                self.total += info.st_blocks * 512

    def step(self) -> None:
        """One folder down, or back up."""
        fd, inner = self.stack[-1]
        if not inner:
            os.close(self.stack.pop()[0])
            return
        name = inner.pop()
        if len(self.stack) >= MAX_DEPTH:
            raise Unmeasurable(f"folders nested deeper than {MAX_DEPTH}")
        try:
            self.enter(os.open(name, DIR_FLAGS, dir_fd=fd))
        except PermissionError:
            raise
        except OSError:
            return  # it went away, or is a link by now
