"""Freezes what queued jobs run: the package, tasks and templates, under the hash of their content."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from autorl_hpc.files.frozen import Parts, code_hash
from autorl_hpc.files.hashing import walk_files
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.share import PACKAGE, share
from autorl_hpc.tasks.folders import code_files

SHARED_PARTS = ("tasks", "templates")
NOT_FROZEN = ("_share/", "models/")
"""Base models lie in the store; the shipped copies of shared parts are frozen beside the package."""


def parts(own: Mapping[str, Path]) -> Parts:
    """What is frozen: the package, built-in tasks and templates, and a user's own task and agent folders among them.

    Args:
        own: folders from outside the package by their frozen place, such as `templates/agents/mine`.
    """
    found = {"autorl_hpc": PACKAGE, **{name: share(name) for name in SHARED_PARTS}}
    replaced = tuple(f"{place}/" for place in own)
    frozen = {
        name: (
            folder,
            [f for f in walk_files(folder) if not f.startswith(NOT_FROZEN) and not f"{name}/{f}".startswith(replaced)],
        )
        for name, folder in found.items()
    }
    return {**frozen, **{place: (folder, code_files(folder)) for place, folder in own.items()}}


def freeze(experiment: ExperimentDir, frozen: Parts) -> str:
    """Copies the code to `code/<hash>/` and returns the hash. A folder that stands is complete: it came by rename."""
    wanted = code_hash(frozen)
    target = experiment.code / wanted
    if target.is_dir():
        return wanted
    work = experiment.code / f".tmp-{wanted[:16]}-{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    for name, (folder, files) in frozen.items():
        for file in files:
            (work / name / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / file, work / name / file)  # with its execute bit
    try:
        os.rename(work, target)
    except OSError:
        shutil.rmtree(work, ignore_errors=True)
        if not target.is_dir():
            raise
    return wanted


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
