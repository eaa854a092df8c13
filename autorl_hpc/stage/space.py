"""Whether a disk has room for what is to come, asked before anything is written."""

from __future__ import annotations

import os
from pathlib import Path

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.stage.progress import in_words
from autorl_hpc.states import Fault

RESERVE_BYTES = 1024 * 1024
"""For manifests and folders beside the files themselves."""


def check_space(folder: Path, needed_bytes: int, what: str) -> None:
    """A quota is not seen by this: then the write fails, and says so.

    Args:
        folder: where it is to lie; it or a folder above it is there.

    Raises:
        AutorlError: `what` doesn't fit; says how much is missing.
    """
    place = next(path for path in (folder, *folder.parents) if path.exists())
    found = os.statvfs(place)
    free = found.f_bavail * found.f_frsize
    missing = needed_bytes + RESERVE_BYTES - free
    if missing > 0:
        raise AutorlError(
            f"{what} needs {in_words(needed_bytes)}, and {in_words(free)} are free: {in_words(missing)} are missing",
            where=place,
            fault=Fault.CLUSTER,
            next_step="free some space, or point --root at another file system, then run the same command again",
            exit_code=Exit.ENVIRONMENT,
        )
