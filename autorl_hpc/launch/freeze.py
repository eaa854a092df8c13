"""Freezes what queued jobs run: the package, tasks and templates, under the hash of their content."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from autorl_hpc.files.hashing import tree_sha256, walk_files
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.share import PACKAGE, share

SHARED_PARTS = ("tasks", "templates")
NOT_FROZEN = ("_share/", "models/")
"""Base models lie in the store; the shipped copies of shared parts are frozen beside the package."""


def _parts() -> dict[str, tuple[Path, list[str]]]:
    parts = {"autorl_hpc": PACKAGE, **{name: share(name) for name in SHARED_PARTS}}
    return {
        name: (folder, [file for file in walk_files(folder) if not file.startswith(NOT_FROZEN)])
        for name, folder in parts.items()
    }


def code_hash() -> str:
    """Hash of the package, tasks and templates as they are now."""
    digest = hashlib.sha256()
    for name, (folder, files) in sorted(_parts().items()):
        digest.update(f"{name} {tree_sha256(folder, files)}\n".encode())
    return digest.hexdigest()


def freeze(experiment: ExperimentDir) -> str:
    """Copies the code to `code/<hash>/` and returns the hash. A folder that stands is complete: it came by rename."""
    wanted = code_hash()
    target = experiment.code / wanted
    if target.is_dir():
        return wanted
    work = experiment.code / f".tmp-{wanted[:16]}-{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    for name, (folder, files) in _parts().items():
        for file in files:
            (work / name / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / file, work / name / file)
    try:
        os.rename(work, target)
    except OSError:
        shutil.rmtree(work, ignore_errors=True)
        if not target.is_dir():
            raise
    return wanted


def frozen_is_whole(experiment: ExperimentDir, wanted: str) -> bool:
    """Whether the frozen code still has the hash that it is named by."""
    folder = experiment.code / wanted
    digest = hashlib.sha256()
    for name in sorted(["autorl_hpc", *SHARED_PARTS]):
        digest.update(f"{name} {tree_sha256(folder / name)}\n".encode())
    return folder.is_dir() and digest.hexdigest() == wanted


def git_revision() -> str | None:
    """The revision of the checkout that the package runs from, `+` when it has local changes; None outside one."""
    try:
        head = subprocess.run(
            ["git", "-C", str(PACKAGE.parent), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        if head.returncode or not (PACKAGE.parent / ".git").exists():
            return None
        dirty = subprocess.run(
            ["git", "-C", str(PACKAGE.parent), "status", "--porcelain"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")
    except (OSError, subprocess.TimeoutExpired):
        return None
