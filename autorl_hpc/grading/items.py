"""Items files whose score may not be the one that is committed: another grader may have taken the entry over.

A file is written under a hidden name that holds its hash, and linked to its own name only where nothing stands there. Once a
score is committed, its file is put in place of any other: by whoever committed it, or by whoever finds the entry after that one
died. What is committed is never replaced by anything else.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from autorl_hpc.files import atomic, reading
from autorl_hpc.grading.evaluate import ItemOutcome, write_items


def offer(path: Path, outcomes: Sequence[ItemOutcome]) -> str:
    """Writes an items file for a score that is to be committed and returns its sha256; what stands at `path` stays.

    Raises:
        OSError: the file system failed.
    """
    fresh = _hidden(path, f"{os.getpid()}-{secrets.token_hex(6)}")
    try:
        sha256 = write_items(fresh, outcomes)
        offered = _hidden(path, sha256)
        os.replace(fresh, offered)
    except BaseException:
        atomic.unlink_quietly(fresh)
        raise
    try:
        os.link(offered, path)
    except (FileExistsError, FileNotFoundError):
        pass  # another one's, or our own of an earlier try; or the same file was committed and put in place meanwhile
    atomic.fsync_directory(path.parent)
    return sha256


def settle(path: Path, committed: str | None, own: str | None = None) -> None:
    """Puts the file of the committed score in place. May be done by anyone, and twice.

    Args:
        committed: the items_sha256 of the score that stands in the ledger.
        own: that of the score that the caller offered.

    Raises:
        OSError: the file system failed.
    """
    if own is not None and own != committed:
        atomic.unlink_quietly(_hidden(path, own))
    if committed is None or not (offered := _hidden(path, committed)).exists():
        return
    if _stands(path, committed):
        atomic.unlink_quietly(offered)
        return
    try:
        os.replace(offered, path)
    except FileNotFoundError:
        return  # another grader was faster
    atomic.fsync_directory(path.parent)


def _stands(path: Path, sha256: str) -> bool:
    try:
        return hashlib.sha256(reading.read_bytes(path, max_bytes=reading.MAX_UNPACKED_BYTES)).hexdigest() == sha256
    except (FileNotFoundError, ValueError):
        return False


def _hidden(path: Path, mark: str) -> Path:
    return path.with_name(f"{atomic.TEMPORARY_PREFIX}{path.name}.{mark}")
