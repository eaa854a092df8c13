"""Names of a report's files, and where they lie: what a look at an earlier report needs, without what writes one."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from urllib.parse import quote

from autorl_hpc.errors import AutorlError, from_os_error
from autorl_hpc.files.layout import RunDir

SUMMARY_NAME = "summary.json"
COMPARE_NAME = "compare.json"
RUN_PAGE = "run.html"
INDEX = "index.html"
BESIDE = "runs"
"""The folder beside the index for pages of runs whose own folder can't be written."""

MAX_NAME_BYTES = 180
"""Of a run's folder, in the name of its pages' folder beside the index: file systems take 255 bytes."""


def elsewhere_of(out: Path, genesis: str, home: RunDir) -> Path:
    """The folder beside the index for the pages of a run whose own folder can't be written: sites may have equal run_ids."""
    name = os.fsdecode(os.fsencode(home.run_id)[:MAX_NAME_BYTES])
    return out / BESIDE / f"{name}-{genesis[:8]}"


def link_to(folder: Path, out: Path) -> str:
    """The address of a run's page in an index in `out`. Folders may have names in no encoding."""
    return quote(os.fsencode(os.path.relpath(folder / RUN_PAGE, out)))


OF_THE_CLUSTER = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE)
"""What may happen in any folder; all else comes of the path that was given."""


def make_given(out: Path) -> None:
    """Makes the folder that the user named for the report, before anything is read for it.

    Raises:
        AutorlError: it can't be made, or nothing can be written into it.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        if os.access(out, os.W_OK | os.X_OK):
            return
        why = os.strerror(errno.EACCES)
    except OSError as error:
        if error.errno in OF_THE_CLUSTER:
            raise from_os_error(error, "making the folder of the report", out) from error
        why = "a file of that name is there" if isinstance(error, FileExistsError) else error.strerror or str(error)
    raise AutorlError(
        f"the report can't be written there: {why}",
        where=out,
        next_step="give --out a folder that you may write to, or one that can be made",
    )
