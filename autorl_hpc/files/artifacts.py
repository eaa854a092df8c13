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

from autorl_hpc.files import atomic, reading
from autorl_hpc.files.atomic import TEMPORARY_PREFIX, fsync_directory
from autorl_hpc.files.faults import again

READY_NAME = "MANIFEST.json"
MAX_INSTALL_TRIES = 100
"""Each try that fails means that another run installed or released the same content in between."""

MAX_REMOVE_TRIES = 20
"""Each try that fails means that one more run had begun to take hold of a folder before it was moved away."""

MAX_RELEASE_TRIES = 20
"""Each try that finds something means that a reference moved with its folder while it was looked for."""


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
    gone = artifacts / f"{_gone(content_hash)}{secrets.token_hex(6)}"
    try:
        os.rename(target, gone)
    except OSError:
        return
    try:
        whole = READY_NAME in reading.list_names(gone)
    except NotADirectoryError:
        whole = False
    if whole:
        _put_back(artifacts, gone, content_hash)
    else:
        remove(gone)


def _put_back(artifacts: Path, gone: Path, content_hash: str) -> None:
    """Gives an artifact its name again. Where an equal copy bears it by now, that one takes over who holds this one. What can be
    done in neither way is better left lying than lost."""
    for _ in range(MAX_INSTALL_TRIES):
        try:
            again(lambda: os.rename(gone, artifacts / content_hash))
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                return
        if all(_hand_over(artifacts, gone, content_hash, name) for name in _fresh_names(gone / "refs")):
            remove(gone)
            return


def _hand_over(artifacts: Path, gone: Path, content_hash: str, name: str) -> bool:
    """Moves a reference to the copy that bears the artifact's name; False if that has to be tried again. One that has been released
    meanwhile stays so: only what is still here can be linked, and whoever releases looks at both places."""
    here, there = gone / "refs" / name, artifacts / content_hash / "refs"
    try:
        os.link(here, there / name)
    except FileExistsError:
        pass  # it has come to hold that copy, too
    except OSError:
        return name not in reading.list_names(gone / "refs")
    if name not in reading.list_names(there):
        return False  # released again, or that copy was moved away as well: the next look tells
    atomic.unlink_quietly(here)
    return True


def remove(path: Path) -> None:
    """Removes a folder, or a file in its place, as far as that can be done."""
    for _ in range(MAX_REMOVE_TRIES):
        try:
            again(functools.partial(shutil.rmtree, path))
            return
        except NotADirectoryError:
            break
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:  # somebody was about to write into it when it lost its name
                break
    try:
        again(functools.partial(os.unlink, path))
    except OSError:
        pass


def hold(artifacts: Path, content_hash: str, run_id: str) -> bool:
    """Adds a reference of `run_id` if the artifact is there, a new one in the place of an old one; False if it is not."""
    target = artifacts / content_hash
    if not artifact_ready(artifacts, content_hash):
        return False
    try:
        atomic.write_bytes(target / "refs" / run_id, b"")
    except OSError:
        return False
    # Not in the folder that bears the name now: it went away with another one, whose remover may or may not have seen it.
    return run_id in reading.list_names(target / "refs") and artifact_ready(artifacts, content_hash)


Reference = tuple[int, int]
"""Tells a reference from a later one of its name."""


def reference(artifacts: Path, content_hash: str, run_id: str) -> Reference | None:
    """The reference of `run_id` as it stands; None if there is none to be seen."""
    return _identity(artifacts / content_hash / "refs" / run_id)


def _identity(path: Path) -> Reference | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # opened: an NFS client asks the server then
    except OSError:
        return None
    try:
        info = os.fstat(fd)
        return info.st_ino, info.st_mtime_ns
    except OSError:
        return None
    finally:
        os.close(fd)


def release_if_same(artifacts: Path, content_hash: str, run_id: str, seen: Reference) -> bool:
    """`release`, unless the reference is no longer the one that was `seen`: then somebody has come to need the artifact.

    It is moved aside before it is looked at, under a name that still holds the artifact.
    """
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
                return False  # better a reference too many: the artifact stays until the run is closed
    release(artifacts, content_hash, aside.name)
    return same and reference(artifacts, content_hash, run_id) is None


def release(artifacts: Path, content_hash: str, run_id: str) -> None:
    """Takes the reference of `run_id` away (with what a kill left of it), and the artifact with the last one."""
    target = artifacts / content_hash
    for _ in range(MAX_RELEASE_TRIES):
        # A folder that is moved away may be on its way back: after it, the one that bears the name is looked at once more.
        found = [
            _unlink_reference(folder, run_id) for folder in (target, *_moved_away(artifacts, content_hash), target)
        ]
        if not any(found):
            break
    while not reading.list_names(target / "refs") and target.exists():
        gone = artifacts / f"{_gone(content_hash)}{secrets.token_hex(6)}"
        try:
            os.rename(target, gone)
        except OSError:
            return
        held = _is_held(gone)
        if held is False:
            remove(gone)
            return
        _put_back(artifacts, gone, content_hash)
        if held is None:
            return
        # Someone took hold in between, and may have let go again: look once more.


def _unlink_reference(folder: Path, run_id: str) -> bool:
    """Takes a reference out of one folder, with what a kill left of it; whether there was one."""
    try:
        left = [name for name in reading.list_names(folder / "refs") if name.startswith(f"{run_id}~")]
    except NotADirectoryError:
        return False
    found = False
    for name in (run_id, *left):
        try:
            again(functools.partial(os.unlink, folder / "refs" / name))
            found = True
        except OSError:
            pass
    return found


def _gone(content_hash: str) -> str:
    """How names of an artifact's folders begin that were moved away."""
    return f"{TEMPORARY_PREFIX}gone-{content_hash[:16]}-"


def _moved_away(artifacts: Path, content_hash: str) -> list[Path]:
    try:
        names = again(lambda: os.listdir(artifacts))
    except OSError:
        return []
    return [artifacts / name for name in names if name.startswith(_gone(content_hash))]


def _is_held(gone: Path) -> bool | None:
    """Whether a run holds it; None if that can't be seen."""
    try:
        return bool(_fresh_names(gone / "refs"))
    except OSError:
        return None


def _fresh_names(folder: Path) -> list[str]:
    """The names in `folder` as the server has them: a change of our own makes an NFS client drop what it remembered."""
    probe = folder / f"{TEMPORARY_PREFIX}{secrets.token_hex(6)}"
    try:
        probe.touch()
        os.unlink(probe)
    except OSError:
        pass
    return reading.list_names(folder)
