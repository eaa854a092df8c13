"""Atomic writes: replace a file completely or not at all, and publish a name that only one of several writers can win.

A kill at any step leaves the old file or the new one. Publishing is by `os.link`, which is atomic on NFS; O_CREAT|O_EXCL is not.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from autorl_hpc.files.faults import again, as_lost_answer
from autorl_hpc.records import readable_json

TEMPORARY_PREFIX = ".tmp-"  # prefix of unfinished writes; every listing skips these names


def fsync_directory(path: Path) -> None:
    """Make a rename or link in `path` durable where the file system can. Failures are ignored: the new name is visible already."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            again(lambda: os.fsync(fd))
        finally:
            os.close(fd)


def _write_temporary(path: Path, data: bytes, mode: int, durable: bool = True) -> Path:
    """Write a temporary file beside `path` and return its path. Each retry takes a new name: the old one may exist (lost answer),
    and after a failed fsync only a new file is sure to reach the disk."""

    def once() -> Path:
        temporary = path.parent / f"{TEMPORARY_PREFIX}{path.name[:80]}.{os.getpid()}.{secrets.token_hex(6)}"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
                if durable:
                    os.fsync(fd)
            finally:
                os.close(fd)  # NFS may report a full quota here
        except BaseException as error:
            unlink_quietly(temporary)  # it may exist also where opening failed: the error can be a lost answer
            if isinstance(error, FileExistsError):
                raise as_lost_answer(error) from error
            raise
        return temporary

    return again(once)


def _link_count(path: Path) -> int:
    """Return the link count as the server has it: opening makes an NFS client ask, and fchmod makes other clients notice."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(PermissionError):  # a file system without modes
            os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode))
        return os.fstat(fd).st_nlink
    finally:
        os.close(fd)


def _link(temporary: Path, path: Path) -> bool:
    """Link `path` to the temporary file; return whether we won the name. A retry after a lost answer gets EEXIST too: the link
    count decides."""
    try:
        os.link(temporary, path)
        return True
    except FileExistsError:
        return again(lambda: _link_count(temporary)) > 1


def _rename(temporary: Path, path: Path) -> None:
    """Rename over `path`. On an error, the listing shows whether the rename was done."""
    try:
        os.replace(temporary, path)
    except OSError:
        if again(lambda: temporary.name in os.listdir(path.parent)):
            raise


def unlink_quietly(path: Path) -> None:
    """Remove a file, if it is there and can be removed."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def write_bytes(path: Path, data: bytes, *, mode: int = 0o644, durable: bool = True) -> None:
    """Replace `path` by `data`, completely or not at all. The folder must exist. `durable`: False: no fsync, so a crash of the
    machine may lose the file. Raises OSError: the write failed; the old content is unchanged."""
    temporary = _write_temporary(path, data, mode, durable)
    try:
        again(lambda: _rename(temporary, path))
    except BaseException:
        unlink_quietly(temporary)
        raise
    if durable:
        fsync_directory(path.parent)


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    """Replace `path` by readable JSON with sorted keys; see `write_bytes`."""
    write_bytes(path, readable_json(value), mode=mode)


def publish_bytes(path: Path, data: bytes) -> bool:
    """Create `path` with `data` unless the name is taken. Exactly one of several racing writers gets True. Raises OSError:
    the file system failed; as far as can be seen, nothing was created."""
    temporary = _write_temporary(path, data, 0o444)
    try:
        won = again(lambda: _link(temporary, path))
    except OSError:
        if again(lambda: _link_count(temporary)) == 1:
            raise
        won = True
    finally:
        unlink_quietly(temporary)
    if won:
        fsync_directory(path.parent)
    return won
