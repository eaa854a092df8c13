"""One way to write a file whole or not at all, and one way to publish a name that only one writer can win.

A temporary name in the same directory, write, fsync, rename (or link), fsync of the directory. A kill at any step
leaves the old file or the new one, never a part. `os.link` is the exclusive step: on NFS it is atomic, whereas
O_CREAT|O_EXCL was seen to let two clients win.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from autorl_hpc.files.faults import again, as_lost_answer
from autorl_hpc.records import readable_json

TEMPORARY_PREFIX = ".tmp-"
"""Names with this prefix are unfinished writes; every listing passes over them."""

Hook = Callable[[str], None]
Parts = Callable[[], Iterable[bytes]]


def _no_hook(step: str) -> None:
    """Replaced by tests that kill the process at each step."""


def fsync_directory(path: Path) -> None:
    """Makes a rename or link in `path` durable, where that can be done.

    No failure is an error: some file systems refuse fsync of a directory, and whoever looks sees the name already. To call
    it a failure would make the caller do again what is done.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        again(lambda: os.fsync(fd))
    except OSError:
        pass
    finally:
        os.close(fd)


def _write_temporary(path: Path, parts: Parts, mode: int, hook: Hook, durable: bool = True) -> Path:
    """A synced file of the parts beside `path`. Each try has a name of its own: what a lost answer left behind bears the old
    one, and after a failed fsync only a new file is known to reach the disk."""
    return again(lambda: _write_once(path, parts, mode, hook, durable))


def _write_once(path: Path, parts: Parts, mode: int, hook: Hook, durable: bool) -> Path:
    temporary = path.parent / f"{TEMPORARY_PREFIX}{path.name[:80]}.{os.getpid()}.{secrets.token_hex(6)}"
    hook("start")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except OSError as error:
        unlink_quietly(temporary)  # an error may be the lost answer to a file that was made
        if isinstance(error, FileExistsError):
            raise as_lost_answer(error) from error
        raise
    try:
        try:
            hook("created")
            for data in parts():
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
            hook("written")
            if durable:
                os.fsync(fd)
            hook("synced")
        finally:
            os.close(fd)  # NFS may report a full quota here
    except BaseException:
        unlink_quietly(temporary)
        raise
    return temporary


def _link_count(path: Path) -> int:
    """As the server has it. Opening makes an NFS client ask; other clients learn it by a change of their own."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode))
        except PermissionError:
            pass  # a file system without modes
        return os.fstat(fd).st_nlink
    finally:
        os.close(fd)


def _link(temporary: Path, path: Path) -> bool:
    """Whether `path` is now ours. EEXIST doesn't prove that it is not: it comes too when a link is asked for a second time
    after a lost answer. The link count of the temporary file tells."""
    try:
        os.link(temporary, path)
        return True
    except FileExistsError:
        return again(lambda: _link_count(temporary)) > 1


def _rename(temporary: Path, path: Path) -> None:
    """Renames over `path`. An error proves nothing here either: the listing tells, from which only a rename takes the name."""
    try:
        os.replace(temporary, path)
    except OSError:
        if again(lambda: temporary.name in os.listdir(path.parent)):
            raise


def unlink_quietly(path: Path) -> None:
    """Removes a file; one that is gone, or that can't be removed now, is no error."""
    try:
        os.unlink(path)
    except OSError:
        pass


def write_bytes(path: Path, data: bytes, *, mode: int = 0o644, hook: Hook = _no_hook, durable: bool = True) -> None:
    """Replaces `path` by `data`, whole or not at all. The folder must exist.

    Args:
        durable: False for what can be made again: nothing waits for the disk, and a crash of the machine may leave nothing.

    Raises:
        OSError: the write failed; the old content, if any, still stands.
    """
    write_parts(path, lambda: (data,), mode=mode, hook=hook, durable=durable)


def write_parts(path: Path, parts: Parts, *, mode: int = 0o644, hook: Hook = _no_hook, durable: bool = True) -> None:
    """`write_bytes` of what is too large to be held whole.

    Args:
        parts: gives the bytes from the beginning; called again when writing is tried again.
    """
    temporary = _write_temporary(path, parts, mode, hook, durable)
    try:
        again(lambda: _rename(temporary, path))
    except BaseException:
        unlink_quietly(temporary)
        raise
    hook("renamed")
    if durable:
        fsync_directory(path.parent)
    hook("done")


def write_json(path: Path, value: Any, *, mode: int = 0o644, hook: Hook = _no_hook) -> None:
    """`write_bytes` of readable JSON with sorted keys."""
    write_bytes(path, readable_json(value), mode=mode, hook=hook)


def publish_bytes(path: Path, data: bytes, *, mode: int = 0o444, hook: Hook = _no_hook) -> bool:
    """Creates `path` with `data` unless the name is taken. Exactly one of many racing writers gets True.

    Raises:
        OSError: the file system failed; as far as can be seen, nothing was created.
    """
    temporary = _write_temporary(path, lambda: (data,), mode, hook)
    try:
        try:
            won = again(lambda: _link(temporary, path))
        except OSError:
            if again(lambda: _link_count(temporary)) == 1:
                raise
            won = True
        hook("linked")
    finally:
        unlink_quietly(temporary)
    if won:
        fsync_directory(path.parent)
    hook("done")
    return won
