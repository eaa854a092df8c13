"""Accepted checkpoints: `artifacts/<content_hash>/`, shared by the runs that submitted the same content.

A run that needs an artifact holds a file under its `refs/`. The last one to let go renames the folder away before it is
deleted; a run that came in between finds its reference gone with the folder and copies again.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import secrets
import shutil
from pathlib import Path

from autorl_hpc.files import reading
from autorl_hpc.files.atomic import TEMPORARY_PREFIX, fsync_directory
from autorl_hpc.files.faults import again

READY_NAME = "MANIFEST.json"
MAX_INSTALL_TRIES = 100
"""Each try that fails means that another run installed or released the same content in between."""


def artifact_ready(artifacts: Path, content_hash: str) -> bool:
    """Whether a whole artifact of that content is there."""
    try:
        return READY_NAME in reading.list_names(artifacts / content_hash)
    except NotADirectoryError:
        return False


def new_folder(artifacts: Path, run_id: str, attempt: int) -> Path:
    """An empty folder beside the artifacts to copy into, which bears the mark of its run and attempt."""
    folder = artifacts / f"{_unfinished(run_id)}{attempt}-{os.getpid()}-{secrets.token_hex(8)}"
    again(lambda: folder.mkdir(mode=0o700, exist_ok=True))  # the name is ours: one that stands is a lost answer's
    return folder


def remove_unfinished(artifacts: Path, run_id: str, attempt: int) -> list[str]:
    """Removes the copies that killed attempts of a run, up to `attempt`, left unfinished; their names. What can't be seen or
    removed now is left to the next look."""
    mark, found = _unfinished(run_id), []
    try:
        names = sorted(again(lambda: os.listdir(artifacts)))
    except OSError:
        names = []
    for name in names:
        number = name.removeprefix(mark).partition("-")[0]
        if name.startswith(mark) and number.isdecimal() and int(number) <= attempt:
            remove(artifacts / name)
            found.append(name)
    return found


def _unfinished(run_id: str) -> str:
    """How names of unfinished copies of a run begin. By a hash: a run's name may be as long as a file's."""
    return f"{TEMPORARY_PREFIX}{hashlib.sha256(run_id.encode()).hexdigest()[:16]}-"


def install(artifacts: Path, folder: Path, content_hash: str, run_id: str) -> None:
    """Gives the copied `folder` its name, with a reference of `run_id` in it; an equal one that stands is kept.

    Raises:
        OSError: the file system failed; nothing was installed.
    """
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / run_id).touch()
    target = artifacts / content_hash
    for _ in range(MAX_INSTALL_TRIES):
        if hold(artifacts, content_hash, run_id):
            remove(folder)
            return
        try:
            os.rename(folder, target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            if not artifact_ready(artifacts, content_hash):
                _clear_away(artifacts, content_hash)
            continue
        fsync_directory(artifacts)
        return
    raise OSError(errno.EIO, f"artifacts/{content_hash} could not be installed")


def _clear_away(artifacts: Path, content_hash: str) -> None:
    """Removes something that bears an artifact's name and has no manifest. Renamed first: what another run put there in
    between is whole, and goes back."""
    target = artifacts / content_hash
    gone = artifacts / f"{TEMPORARY_PREFIX}gone-{content_hash[:16]}-{secrets.token_hex(6)}"
    try:
        os.rename(target, gone)
        if READY_NAME in reading.list_names(gone):
            os.rename(gone, target)
            return
    except OSError:
        pass
    remove(gone)


def remove(path: Path) -> None:
    """Removes a folder, or a file in its place, as far as that can be done."""
    for step in (shutil.rmtree, os.unlink):
        try:
            again(functools.partial(step, path))
        except OSError:
            continue


def hold(artifacts: Path, content_hash: str, run_id: str) -> bool:
    """Adds a reference of `run_id` if the artifact is there; False if it is not."""
    target = artifacts / content_hash
    if not artifact_ready(artifacts, content_hash):
        return False
    try:
        (target / "refs" / run_id).touch()
    except OSError:
        return False
    return artifact_ready(artifacts, content_hash)


def release(artifacts: Path, content_hash: str, run_id: str) -> None:
    """Takes the reference of `run_id` away, and the artifact with the last one."""
    target = artifacts / content_hash
    try:
        again(lambda: os.unlink(target / "refs" / run_id))
    except OSError:
        pass
    if reading.list_names(target / "refs") or not target.exists():
        return
    gone = artifacts / f"{TEMPORARY_PREFIX}gone-{content_hash[:16]}-{secrets.token_hex(6)}"
    try:
        os.rename(target, gone)
    except OSError:
        return
    if _is_held(gone):  # someone took hold in between
        try:
            again(lambda: os.rename(gone, target))
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                return  # better left lying than lost
    remove(gone)


def _is_held(gone: Path) -> bool:
    """Whether a run holds it; so it is taken to be as long as that can't be seen."""
    try:
        return bool(_fresh_names(gone / "refs"))
    except OSError:
        return True


def _fresh_names(folder: Path) -> list[str]:
    """The names in `folder` as the server has them: a change of our own makes an NFS client drop what it remembered."""
    probe = folder / f"{TEMPORARY_PREFIX}{secrets.token_hex(6)}"
    try:
        probe.touch()
        os.unlink(probe)
    except OSError:
        pass
    return reading.list_names(folder)
