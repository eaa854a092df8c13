"""Accepted checkpoints: `artifacts/<content_hash>/`, shared by the runs that submitted the same content.

A run that needs an artifact holds a file under its `refs/`. The last one to let go renames the folder away before it is
deleted; a run that came in between finds its reference gone with the folder and copies again.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from autorl_hpc.files import reading
from autorl_hpc.files.atomic import TEMPORARY_PREFIX, fsync_directory

READY_NAME = "MANIFEST.json"


def artifact_ready(artifacts: Path, content_hash: str) -> bool:
    """Whether a whole artifact of that content is there."""
    return READY_NAME in reading.list_names(artifacts / content_hash)


def new_folder(artifacts: Path) -> Path:
    """An empty folder beside the artifacts to copy into."""
    folder = artifacts / f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    folder.mkdir(mode=0o700)
    return folder


def install(artifacts: Path, folder: Path, content_hash: str, run_id: str) -> None:
    """Gives the copied `folder` its name, with a reference of `run_id` in it; an equal one that stands is kept."""
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / run_id).touch()
    target = artifacts / content_hash
    while True:
        if hold(artifacts, content_hash, run_id):
            shutil.rmtree(folder, ignore_errors=True)
            return
        try:
            os.rename(folder, target)
        except OSError:
            if not artifact_ready(artifacts, content_hash) and target.exists():
                # Remains of a deletion that was killed: no manifest, so nobody can be using it.
                shutil.rmtree(target, ignore_errors=True)
            continue
        fsync_directory(artifacts)
        return


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
        os.unlink(target / "refs" / run_id)
    except OSError:
        pass
    if reading.list_names(target / "refs") or not target.exists():
        return
    gone = artifacts / f"{TEMPORARY_PREFIX}gone-{content_hash[:16]}-{secrets.token_hex(6)}"
    try:
        os.rename(target, gone)
    except OSError:
        return
    if reading.list_names(gone / "refs"):  # someone took hold in between
        try:
            os.rename(gone, target)
            return
        except OSError:
            pass
    shutil.rmtree(gone, ignore_errors=True)
