"""Writes the pages, tables and records of a merged report. The same tree gives the same bytes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from urllib.parse import quote

from autorl_hpc.errors import from_os_error
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.layout import RunDir
from autorl_hpc.records.canonical import readable_json
from autorl_hpc.report import pages, tables
from autorl_hpc.report.summary import MergedReport, RunSummary
from autorl_hpc.report.versus import Versus

SUMMARY_NAME = "summary.json"
COMPARE_NAME = "compare.json"
NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS)
"""A run's folder that belongs to somebody else, or a site's tree mounted read-only: its pages go beside the index."""


def run_files(run: RunSummary) -> dict[str, bytes]:
    """The files of one run's report."""
    return {
        SUMMARY_NAME: readable_json(run.model_dump(mode="json")),
        "run.md": pages.run_md(run).encode(),
        "run.html": pages.run_html(run).encode(),
    }


def merged_files(merged: MergedReport, links: dict[int, str]) -> dict[str, bytes]:
    """The files of a merged report.

    Args:
        links: of each run's place in it, the address of its page.
    """
    return {
        SUMMARY_NAME: readable_json(merged.model_dump(mode="json")),
        "summary.csv": tables.as_csv(merged).encode(),
        "leaderboard.csv": tables.leaderboard_csv(merged).encode(),
        "summary.md": pages.index_md(merged).encode(),
        "index.html": pages.index_html(merged, links).encode(),
    }


def write_all(merged: MergedReport, out: Path) -> Path:
    """Writes everything and returns the path of index.html.

    Raises:
        AutorlError: the folder can't be written.
    """
    out = out.absolute()
    try:
        out.mkdir(parents=True, exist_ok=True)
        links: dict[int, str] = {}
        for place, (run, folder) in enumerate(zip(merged.runs, merged.run_folders, strict=True)):
            home = RunDir(Path(folder))
            page = _write_run(run, home.report, elsewhere_of(out, place, home))
            links[place] = quote(Path(os.path.relpath(page, out)).as_posix())
        _put_files(out, merged_files(merged, links))
    except OSError as error:
        raise from_os_error(error, "writing the report", error.filename or out) from error
    return out / "index.html"


def versus_files(versus: Versus) -> dict[str, bytes]:
    """The files of a comparison."""
    return {
        COMPARE_NAME: readable_json(versus.model_dump(mode="json")),
        "compare.md": pages.versus_md(versus).encode(),
        "compare.html": pages.versus_html(versus).encode(),
    }


def write_versus(versus: Versus, out: Path) -> None:
    """Writes a comparison beside the index.

    Raises:
        AutorlError: the folder can't be written.
    """
    try:
        _put_files(out, versus_files(versus))
    except OSError as error:
        raise from_os_error(error, "writing the comparison", error.filename or out) from error


def elsewhere_of(out: Path, place: int, home: RunDir) -> Path:
    """The folder beside the index for the pages of run number `place`, where its own folder can't be written."""
    return out / "runs" / f"{place + 1:04d}-{home.run_id}"


def _write_run(run: RunSummary, home: Path, elsewhere: Path) -> Path:
    """Writes one run's report into its folder, or beside the index where that is not ours to write."""
    files = run_files(run)
    try:
        folder = _put_files(home, files)
    except OSError as error:
        if error.errno not in NOT_OURS:
            raise
        folder = _put_files(elsewhere, files)
    return folder / "run.html"


def _put_files(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        _put(folder / name, data)
    return folder


def _put(path: Path, data: bytes) -> None:
    """Writes a file unless it says this already: reporting again is cheap and changes no time of change."""
    try:
        if reading.read_bytes(path) == data:
            return
    except (OSError, ValueError):
        pass
    atomic.write_bytes(path, data)
