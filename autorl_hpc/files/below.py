"""Opening what lies below a folder that belongs to an agent: by descriptors, following no link, waiting for nobody."""

from __future__ import annotations

import os
import stat

DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""Not blocking: a FIFO that takes a file's place between look and open must hold nobody."""


def open_below(root_fd: int, parts: tuple[str, ...], flags: int) -> int:
    """Opens a file or folder part by part, following no link. Raises OSError."""
    fd = os.dup(root_fd)
    try:
        for number, part in enumerate(parts):
            following = os.open(part, flags if number == len(parts) - 1 else DIR_FLAGS, dir_fd=fd)
            os.close(fd)
            fd = following
    except OSError:
        os.close(fd)
        raise
    if not parts:
        os.close(fd)
        return os.open(".", flags, dir_fd=root_fd)
    return fd


def open_regular(root_fd: int, parts: tuple[str, ...]) -> int | None:
    """Opens a regular file; None if something else is there by now. Raises OSError."""
    fd = open_below(root_fd, parts, FILE_FLAGS)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None
