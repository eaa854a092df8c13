"""Writes the pages, tables and records of a report. The same tree gives the same bytes.

All of it can be made again, so nothing here waits for a disk: a file appears whole or not at all, and a crash may lose it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

from autorl_hpc.errors import from_os_error
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.layout import RunDir
from autorl_hpc.report import pages, run_parts, tables
from autorl_hpc.report.outputs import COMPARE_NAME, INDEX, RUN_PAGE, SUMMARY_NAME, elsewhere_of, link_to
from autorl_hpc.report.summary import MergedReport, RunSummary
from autorl_hpc.report.versus import Versus

NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS)
"""A run's folder that belongs to somebody else, or a site's tree mounted read-only: its pages go beside the index."""


def run_summary(run: RunSummary) -> bytes:
    """One run's summary.json."""
    return run.model_dump_json(indent=2).encode() + b"\n"


def run_files(run: RunSummary) -> dict[str, bytes]:
    """The files of one run's report."""
    shown = run_parts.shown(run)
    return {
        SUMMARY_NAME: run_summary(run),
        "run.md": pages.run_md(run, shown).encode(),
        RUN_PAGE: pages.run_html(run, shown).encode(),
    }


def merged_files(merged: MergedReport, links: dict[int, str]) -> dict[str, bytes]:
    """The files of a merged report, which tells of each run in short.

    Args:
        links: of each run's place in it, the address of its page.
    """
    merged = merged.short()
    return {SUMMARY_NAME: b"".join(merged_summary(merged)), **_merged_pages(merged, links)}


def merged_summary(merged: MergedReport) -> Iterator[bytes]:
    """summary.json, run by run: of thousands of runs it takes hundreds of megabytes, and is held whole nowhere."""
    shell = merged.model_copy(update={"runs": ()}).model_dump_json(indent=1).encode()
    before, mark, after = shell.partition(b'\n "runs": []')
    yield before + (b'\n "runs": [' if merged.runs else mark)
    for place, run in enumerate(merged.runs):
        told = run.short().model_dump_json(indent=1).encode().replace(b"\n", b"\n  ")  # no text has a bare end of line
        yield (b",\n  " if place else b"\n  ") + told
    yield (b"\n ]" if merged.runs else b"") + after + b"\n"


def _merged_pages(merged: MergedReport, links: dict[int, str]) -> dict[str, bytes]:
    return {
        "summary.csv": tables.as_csv(merged).encode(),
        "leaderboard.csv": tables.leaderboard_csv(merged).encode(),
        "summary.md": pages.index_md(merged).encode(),
        INDEX: pages.index_html(merged, links).encode(),
    }


def write_all(merged: MergedReport, out: Path) -> Path:
    """Writes the pages of every run, whole summaries all of them, and the merged report; returns the path of index.html.

    Raises:
        AutorlError: the folder can't be written.
    """
    out = out.absolute()
    folders = [
        write_run(run, RunDir(Path(folder)), out) for run, folder in zip(merged.runs, merged.run_folders, strict=True)
    ]
    return write_merged(merged, folders, out)


def versus_files(versus: Versus) -> dict[str, bytes]:
    """The files of a comparison."""
    return {
        COMPARE_NAME: versus.model_dump_json(indent=2).encode() + b"\n",
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


def write_run(run: RunSummary, home: RunDir, out: Path) -> Path:
    """Writes one run's report and returns its folder: the run's own, or one beside the index where that is not ours to write.

    Raises:
        AutorlError: neither can be written.
    """
    files = run_files(run)
    try:
        if run.imported is not None:
            return _put_files(elsewhere_of(out, run.genesis, home), files)
        try:
            return _put_files(home.report, files)
        except OSError as error:
            if error.errno not in NOT_OURS:
                raise
            return _put_files(elsewhere_of(out, run.genesis, home), files)
    except OSError as error:
        raise from_os_error(error, "writing the report", error.filename or out) from error


def write_merged(merged: MergedReport, folders: Sequence[Path], out: Path, reload_s: int | None = None) -> Path:
    """Writes the merged report and returns the path of index.html.

    Args:
        folders: where the pages of each of its runs lie.
        reload_s: the index asks the browser to load it again after so many seconds.

    Raises:
        AutorlError: the folder can't be written.
    """
    links = {place: link_to(folder, out) for place, folder in enumerate(folders)}
    try:
        merged = merged.short()
        files = _merged_pages(merged, links)
        if reload_s is not None:
            files[INDEX] = reloading(files[INDEX], reload_s)
        _put_files(out, files)
        if not reading.says(out / SUMMARY_NAME, merged_summary(merged)):
            atomic.write_parts(out / SUMMARY_NAME, lambda: merged_summary(merged), durable=False)
    except OSError as error:
        raise from_os_error(error, "writing the report", error.filename or out) from error
    return out / INDEX


def reloading(page: bytes, seconds: int) -> bytes:
    """A page that the browser loads again by itself."""
    return page.replace(b"<head>", b'<head>\n<meta http-equiv="refresh" content="%d">' % seconds, 1)


def _put_files(folder: Path, files: dict[str, bytes]) -> Path:
    """Writes files unless they say this already: reporting again is cheap and changes no time of change."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        if not reading.says(folder / name, (data,)):
            atomic.write_bytes(folder / name, data, durable=False)
    return folder
