"""Names of a report's files, and where they lie: what a look at an earlier report needs, without what writes one."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote

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
