"""Accepted checkpoints: `artifacts/<content_hash>/`, shared by the runs that submitted the same content.

A run that needs an artifact has a reference file in its `refs/`. When the last reference is released, the folder is renamed
and then deleted. A run that added its reference in between finds it gone with the folder and copies again.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from autorl_hpc.files import atomic, reading
from autorl_hpc.files.atomic import TEMPORARY_PREFIX, fsync_directory
from autorl_hpc.files.faults import again

READY_NAME = "MANIFEST.json"
MAX_TRIES = 100  # each failed try means that another run installed, referenced or released the same content in between


def artifact_ready(artifacts: Path, content_hash: str) -> bool:
    """Return whether a complete artifact with that content hash exists."""
    return READY_NAME in _names(artifacts / content_hash)


def _names(folder: Path) -> list[str]:
    try:
        return reading.list_names(folder)
    except NotADirectoryError:
        return []


def new_folder(artifacts: Path, run_id: str, attempt: int) -> Path:
    """Make and return an empty folder beside the artifacts to copy into. Its name carries the run and the attempt."""
    folder = artifacts / f"{_unfinished(run_id)}{attempt}-{os.getpid()}-{secrets.token_hex(8)}"
    again(lambda: folder.mkdir(mode=0o700, exist_ok=True))  # random name: if it exists, we made it
    return folder


def remove_unfinished(artifacts: Path, run_id: str, attempt: int) -> list[str]:
    """Remove unfinished copies of a run's killed attempts, up to `attempt`, and return their names. What can't be seen or
    removed now is left for the next call."""
    found = []
    for folder in sorted(_hidden(artifacts, mark := _unfinished(run_id))):
        number = folder.name.removeprefix(mark).partition("-")[0]
        if number.isdecimal() and int(number) <= attempt:
            remove(folder)
            found.append(folder.name)
    return found


def _unfinished(run_id: str) -> str:
    """Return the name prefix of a run's unfinished copies. A hash, because a run's name may be too long."""
    return f"{TEMPORARY_PREFIX}{hashlib.sha256(run_id.encode()).hexdigest()[:16]}-"


def _gone(content_hash: str) -> str:
    """Return the name prefix of an artifact's folders that were moved away."""
    return f"{TEMPORARY_PREFIX}gone-{content_hash[:16]}-"


def _hidden(artifacts: Path, prefix: str) -> list[Path]:
    try:
        return [artifacts / name for name in again(lambda: os.listdir(artifacts)) if name.startswith(prefix)]
    except OSError:
        return []


def install(artifacts: Path, folder: Path, content_hash: str, run_id: str) -> None:
    """Rename the copied `folder` to its content hash, with a reference of `run_id` in it. An existing equal artifact is
    kept. Raises OSError: the file system failed; nothing was installed."""
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / run_id).touch()
    for _ in range(MAX_TRIES):
        if hold(artifacts, content_hash, run_id):
            remove(folder)
            return
        try:
            os.rename(folder, artifacts / content_hash)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            if not artifact_ready(artifacts, content_hash):
                _remove_unless(artifacts, content_hash, lambda gone: READY_NAME in _names(gone))
            continue
        fsync_directory(artifacts)
        return
    raise OSError(errno.EIO, f"artifacts/{content_hash} could not be installed")


def _remove_unless(artifacts: Path, content_hash: str, wanted: Callable[[Path], bool]) -> None:
    """Remove an artifact's folder. It is renamed first, so that nobody finds it; if it is `wanted`, or that can't be seen, it is
    put back."""
    gone = artifacts / f"{_gone(content_hash)}{secrets.token_hex(6)}"
    try:
        os.rename(artifacts / content_hash, gone)
    except OSError:
        return
    try:
        keep = wanted(gone)
    except OSError:
        keep = True
    if not keep:
        remove(gone)
        return
    for _ in range(MAX_TRIES):
        try:
            again(lambda: os.rename(gone, artifacts / content_hash))
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                return  # the folder stays under its temporary name
        # An equal copy has the name by now: it takes over the references.
        if all(_hand_over(artifacts, gone, content_hash, name) for name in _fresh_names(gone / "refs")):
            remove(gone)
            return


def _hand_over(artifacts: Path, gone: Path, content_hash: str, name: str) -> bool:
    """Move a reference to the copy that has the artifact's name. Return False if this must be tried again. A reference that was
    released meanwhile stays so: it can be linked only while it is here, and `release` looks at both places."""
    here, there = gone / "refs" / name, artifacts / content_hash / "refs"
    try:
        os.link(here, there / name)
    except FileExistsError:
        pass  # that run references the other copy already
    except OSError:
        return name not in reading.list_names(gone / "refs")
    if name not in reading.list_names(there):
        return False  # released again, or that copy was moved away too: the next round shows it
    atomic.unlink_quietly(here)
    return True


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
    """Add or renew the reference of `run_id`. Return False if the artifact does not exist or was moved away meanwhile."""
    refs = artifacts / content_hash / "refs"
    if not artifact_ready(artifacts, content_hash):
        return False
    try:
        atomic.write_bytes(refs / run_id, b"")
    except OSError:
        return False
    # If the reference is missing now, it went away with a renamed folder, and the remover may not have seen it.
    return run_id in reading.list_names(refs) and artifact_ready(artifacts, content_hash)


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
    """Release the reference of `run_id` unless it was replaced since it was `seen`. Return whether it was released. The
    reference is first renamed to a name that still protects the artifact, and then compared."""
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
    target = artifacts / content_hash
    for _ in range(MAX_TRIES):
        # A folder that was moved away may be on its way back, so the folder with the artifact's name is checked again last.
        folders = (target, *_hidden(artifacts, _gone(content_hash)), target)
        if not sum(_unlink_reference(folder, run_id) for folder in folders):  # in all of them
            break
    for _ in range(MAX_TRIES):
        if reading.list_names(target / "refs") or not target.exists():
            return
        _remove_unless(artifacts, content_hash, lambda gone: bool(_fresh_names(gone / "refs")))


def _unlink_reference(folder: Path, run_id: str) -> bool:
    """Remove a reference, and what a killed release left of it, from one folder. Return whether there was one."""
    found = False
    for name in (run_id, *(name for name in _names(folder / "refs") if name.startswith(f"{run_id}~"))):
        try:
            again(functools.partial(os.unlink, folder / "refs" / name))
            found = True
        except OSError:
            pass
    return found


def _fresh_names(folder: Path) -> list[str]:
    """Return the names in `folder` as the server has them: writing to the folder makes an NFS client drop its cached listing."""
    probe = folder / f"{TEMPORARY_PREFIX}{secrets.token_hex(6)}"
    try:
        probe.touch()
        os.unlink(probe)
    except OSError:
        pass
    return reading.list_names(folder)
