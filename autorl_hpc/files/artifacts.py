"""Accepted checkpoints: `artifacts/<content_hash>/`, shared by the runs that submitted the same content.

A run that needs one has a file in its `refs/`. It is removed only after `rmdir(refs)`, after which nobody can add a reference.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import secrets
import shutil
import time
from pathlib import Path

from autorl_hpc.files import atomic, reading
from autorl_hpc.files.atomic import TEMPORARY_PREFIX, fsync_directory
from autorl_hpc.files.faults import again

READY_NAME = "MANIFEST.json"
MAX_TRIES = 100  # each failed try means that another run installs, references or removes the same content
PAUSE_S = 0.05
PATIENCE_TRIES = 20  # then a folder without references is what a killed run left


def artifact_ready(artifacts: Path, content_hash: str) -> bool:
    return READY_NAME in _names(artifacts / content_hash)


def _names(folder: Path) -> list[str]:
    try:
        return reading.list_names(folder)
    except NotADirectoryError:
        return []


def new_folder(artifacts: Path, run_id: str, attempt: int) -> Path:
    """Make and return an empty folder beside the artifacts to copy into."""
    folder = artifacts / f"{_unfinished(run_id)}{attempt}-{os.getpid()}-{secrets.token_hex(8)}"
    again(lambda: folder.mkdir(exist_ok=True))  # random name: if it exists, we made it
    return folder


def remove_unfinished(artifacts: Path, run_id: str, attempt: int) -> list[str]:
    """Remove unfinished copies of a run's attempts, up to `attempt`, as far as possible now; return their names."""
    found, mark = [], _unfinished(run_id)
    with contextlib.suppress(OSError):
        for name in sorted(again(lambda: os.listdir(artifacts))):
            number = name.removeprefix(mark).partition("-")[0]
            if name.startswith(mark) and number.isdecimal() and int(number) <= attempt:
                remove(artifacts / name)
                found.append(name)
    return found


def _unfinished(run_id: str) -> str:
    """Return the name prefix of a run's unfinished copies. A hash, because a run's name may be too long."""
    return f"{TEMPORARY_PREFIX}{hashlib.sha256(run_id.encode()).hexdigest()[:16]}-"


def install(artifacts: Path, folder: Path, content_hash: str, run_id: str) -> None:
    """Rename the copied `folder` to its content hash, with a reference of `run_id`; an existing equal artifact is kept. Raises
    OSError: nothing was installed."""
    target = artifacts / content_hash
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / run_id).touch()
    for number in range(MAX_TRIES):
        if hold(artifacts, content_hash, run_id):
            remove(folder)
            return
        try:
            os.rename(folder, target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
        else:
            fsync_directory(artifacts)
            return
        if number >= PATIENCE_TRIES:
            _clear_remains(target)
        time.sleep(PAUSE_S)
    raise OSError(errno.EIO, f"artifacts/{content_hash} could not be installed")


def _clear_remains(target: Path) -> None:
    """Give a complete folder that a killed run left an empty `refs/`, so that it can be held; remove what is not complete."""
    try:
        os.mkdir(target / "refs")
    except FileExistsError:
        return  # not remains
    except OSError:
        pass
    if READY_NAME not in _names(target):
        remove(target)


def _remove_unreferenced(artifacts: Path, content_hash: str) -> None:
    """Remove an artifact unless somebody has a reference. It is renamed first, so that nobody finds a part of it."""
    target, gone = artifacts / content_hash, artifacts / f"{TEMPORARY_PREFIX}gone-{secrets.token_hex(8)}"
    try:
        again(lambda: os.rmdir(target / "refs"))
        os.rename(target, gone)
    except OSError:
        return
    if (gone / "refs").exists():  # `_clear_remains` took this for remains, since we were slow
        with contextlib.suppress(OSError):
            os.rename(gone, target)
    else:
        remove(gone)


def remove(path: Path) -> None:
    """Remove a folder or a file, as far as possible. Errors are ignored."""
    for _ in range(MAX_TRIES):
        try:
            again(lambda: shutil.rmtree(path))
            return
        except NotADirectoryError:
            atomic.unlink_quietly(path)
            return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:  # another run was writing into it when it was renamed
                return


def hold(artifacts: Path, content_hash: str, run_id: str) -> bool:
    """Add or renew the reference of `run_id`. Return False if the artifact does not exist or is being removed."""
    if not artifact_ready(artifacts, content_hash):
        return False
    try:
        with open(artifacts / content_hash / "refs" / run_id, "wb") as file:
            os.utime(file.fileno(), ns=(time.time_ns(), time.time_ns()))  # to the nanosecond: see `Reference`
            os.fsync(file.fileno())
    except OSError:
        return False
    return True


Reference = tuple[int, int]  # (inode, mtime in ns): distinguishes a reference from a later one with the same name


def reference(artifacts: Path, content_hash: str, run_id: str) -> Reference | None:
    """Return the identity of `run_id`'s reference, or None if none is visible."""
    return _identity(artifacts / content_hash / "refs" / run_id)


def _identity(path: Path) -> Reference | None:
    try:
        with open(path, "rb") as file:  # opening makes an NFS client ask the server
            info = os.fstat(file.fileno())
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns


def release_if_same(artifacts: Path, content_hash: str, run_id: str, seen: Reference) -> bool:
    """Release the reference of `run_id` unless it was replaced since it was `seen`; return whether it was released. It is first
    renamed to a name that still protects the artifact, and then compared."""
    refs = artifacts / content_hash / "refs"
    aside = refs / f"{run_id}~{secrets.token_hex(6)}"
    try:
        os.rename(refs / run_id, aside)
    except OSError:
        return False
    same = _identity(aside) == seen
    if not same:
        try:
            os.link(aside, refs / run_id)
        except OSError:
            if run_id not in reading.list_names(refs):
                return False  # keep the extra reference: the artifact stays until the run is closed
    release(artifacts, content_hash, aside.name)
    return same and reference(artifacts, content_hash, run_id) is None


def release(artifacts: Path, content_hash: str, run_id: str) -> None:
    """Remove the reference of `run_id` and what a killed release left of it. The last reference removes the artifact too."""
    refs = artifacts / content_hash / "refs"
    for name in (run_id, *(name for name in _names(refs) if name.startswith(f"{run_id}~"))):
        with contextlib.suppress(OSError):
            again(functools.partial(os.unlink, refs / name))
    _remove_unreferenced(artifacts, content_hash)
