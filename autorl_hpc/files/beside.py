"""Folders of users' own agents and tasks, which are looked into before the built-in ones. A variable names them, so that child processes know them too."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from autorl_hpc.errors import AutorlError


def named_by(variable: str) -> list[Path]:
    """The folders that a variable names, first the one that is looked into first."""
    return [Path(part).absolute() for part in os.environ.get(variable, "").split(os.pathsep) if part]


def put_first(variable: str, folders: Sequence[Path], kind: str) -> None:
    """Puts folders before those that the variable names, for this process and those that it starts.

    Args:
        kind: what lies in folders of its own there: `agent`, `task`.

    Raises:
        AutorlError: one is no folder.
    """
    for folder in folders:
        if not folder.is_dir():
            raise AutorlError(
                f"--{kind}s names the folder that holds {kind} folders, and this is none",
                where=folder.absolute(),
                next_step=f"correct the path; of a{'n' if kind[0] == 'a' else ''} {kind} in ~/{kind}s/mine/ it is ~/{kind}s",
            )
    given = [str(folder.absolute()) for folder in folders]
    os.environ[variable] = os.pathsep.join([*given, *filter(None, [os.environ.get(variable)])])
