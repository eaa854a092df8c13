"""One way to write a file whole or not at all, and one way to publish a name that only one writer can win.

A temporary name in the same directory, write, fsync, rename (or link), fsync of the directory. A kill at any step
leaves the old file or the new one, never a part. `os.link` is the exclusive step: on NFS it is atomic, whereas
O_CREAT|O_EXCL was seen to let two clients win.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autorl_hpc.records.canonical import readable_json

TEMPORARY_PREFIX = ".tmp-"
"""Names with this prefix are unfinished writes; every listing passes over them."""

Hook = Callable[[str], None]


def _no_hook(step: str) -> None:
    """Replaced by tests that kill the process at each step."""


def fsync_directory(path: Path) -> None:
    """Makes a rename or link in `path` durable. Some file systems refuse fsync of a directory: that is no error."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EIO):
            raise
    finally:
        os.close(fd)


def _write_temporary(path: Path, data: bytes, mode: int, hook: Hook) -> Path:
    temporary = path.parent / f"{TEMPORARY_PREFIX}{path.name[:80]}.{os.getpid()}.{secrets.token_hex(6)}"
    hook("start")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            hook("created")
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            hook("written")
            os.fsync(fd)
            hook("synced")
        finally:
            os.close(fd)  # NFS may report a full quota here
    except BaseException:
        unlink_quietly(temporary)
        raise
    return temporary


def _link_count(path: Path) -> int:
    """By open and fstat: opening is what makes an NFS client ask the server rather than its own memory."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.fstat(fd).st_nlink
    finally:
        os.close(fd)


def unlink_quietly(path: Path) -> None:
    """Removes a file; one that is gone, or that can't be removed now, is no error."""
    try:
        os.unlink(path)
    except OSError:
        pass


def write_bytes(path: Path, data: bytes, *, mode: int = 0o644, hook: Hook = _no_hook) -> None:
    """Replaces `path` by `data`, whole or not at all. The folder must exist.

    Raises:
        OSError: the write failed; the old content, if any, still stands.
    """
    temporary = _write_temporary(path, data, mode, hook)
    try:
        os.replace(temporary, path)
    except BaseException:
        unlink_quietly(temporary)
        raise
    hook("renamed")
    fsync_directory(path.parent)
    hook("done")


def write_json(path: Path, value: Any, *, mode: int = 0o644, hook: Hook = _no_hook) -> None:
    """`write_bytes` of readable JSON with sorted keys."""
    write_bytes(path, readable_json(value), mode=mode, hook=hook)


def publish_bytes(path: Path, data: bytes, *, mode: int = 0o444, hook: Hook = _no_hook) -> bool:
    """Creates `path` with `data` unless the name is taken. Exactly one of many racing writers gets True.

    A link whose reply was lost (NFS retransmission) reports EEXIST although it was ours: the link count of the
    temporary file tells.
    """
    temporary = _write_temporary(path, data, mode, hook)
    try:
        try:
            os.link(temporary, path)
            won = True
        except FileExistsError:
            won = _link_count(temporary) == 2
        hook("linked")
    finally:
        unlink_quietly(temporary)
    if won:
        fsync_directory(path.parent)
    hook("done")
    return won
