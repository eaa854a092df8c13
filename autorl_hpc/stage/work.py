"""Folders that a staging works in, and a lock that keeps two of them apart."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.atomic import TEMPORARY_PREFIX


@contextmanager
def alone(path: Path, doing: str) -> Iterator[int]:
    """`path`, opened for this process alone, as far as locks work here: some file systems give a lock to everybody, so
    whatever is done under it must be checked in the end.

    Raises:
        AutorlError: another process does it now.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AutorlError(
                    f"another process is {doing}",
                    where=path,
                    next_step="wait for its end, then run the same command again",
                    exit_code=Exit.ENVIRONMENT,
                ) from None
            except OSError:
                pass  # no locks on this file system
            if _same_file(fd, path):
                yield fd
                return
        finally:
            os.close(fd)


def _same_file(fd: int, path: Path) -> bool:
    """Whether `path` still is the opened file: another process may have finished it in between."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


@contextmanager
def work_folder(parent: Path, purpose: str, *, mode: int = 0o755) -> Iterator[Path]:
    """An empty folder in `parent`, removed in the end. Those of processes of this host that were killed are removed first."""
    parent.mkdir(parents=True, exist_ok=True)
    host = socket.gethostname().partition(".")[0]
    stem = f"{TEMPORARY_PREFIX}{purpose}-{host}-"
    for name in os.listdir(parent):
        pid = name.removeprefix(stem)
        if name.startswith(stem) and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            remove_folder(parent / name)
    work = parent / f"{stem}{os.getpid()}"
    remove_folder(work)
    work.mkdir(mode=mode)
    try:
        yield work
    finally:
        remove_folder(work)


def remove_folder(folder: Path) -> None:
    """Removes a folder, though its parts are read-only."""
    if folder.is_symlink():
        folder.unlink()
        return
    for parent, _, _ in os.walk(folder):
        os.chmod(parent, stat.S_IRWXU)
    shutil.rmtree(folder, ignore_errors=True)
