"""The report made anew: runs that changed are read one by one and their pages written, the others come from what was kept.

One run at a time is held whole: its pages are written, its summary in short stays. So thousands fit into memory.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import RunDir
from autorl_hpc.report.chain import Chain
from autorl_hpc.report.charts.files import write_figures
from autorl_hpc.report.digest import Library, digest
from autorl_hpc.report.digests import Digests, Kept, numbers_of
from autorl_hpc.report.find import Found
from autorl_hpc.report.merge import Unwritten, merge_found
from autorl_hpc.report.paper import read_paper
from autorl_hpc.report.stamps import with_items
from autorl_hpc.report.summary import MergedReport, RunSummary
from autorl_hpc.report.versus import compare
from autorl_hpc.report.write import write_merged, write_run, write_versus

if TYPE_CHECKING:
    from autorl_hpc.report.refresh import Options

OBJECTS_BEFORE_COLLECTION = 200_000
"""Records have no cycles, and a collector that looks through all of them every 700 takes a third of the time."""


class Made(NamedTuple):
    """What was made.

    Attributes:
        keys: of each run, by its folder, that can be told from a changed one; see `Digests.key`.
        read: runs that were read.
    """

    merged: MergedReport
    keys: dict[Path, str]
    read: int


def remake(found: Found, out: Path, digests: Digests, kept: dict[Path, Kept], options: Options) -> Made:
    """Reads, merges and writes.

    Raises:
        AutorlError: there is nothing to compare under such a name, or the folder can't be written.
    """
    taking = Taking(out, digests, kept)
    with _rare_collections():
        merged = merge_found(found, taking)
        folders = [taking.pages(run, Path(home)) for run, home in zip(merged.runs, merged.run_folders, strict=True)]
        merged = merged.model_copy(update={"paper": read_paper()}) if options.paper else merged
        versus = compare(merged, *options.compare) if options.compare is not None else None
        write_merged(merged, folders, out, options.reload_s)
        if versus is not None:
            write_versus(versus, out)
        if options.figures:
            write_figures(merged, out)
    return Made(merged, taking.keys, taking.read)


class Taking:
    """How `merge` takes a run here: from its digest, else by reading it and writing its pages."""

    def __init__(self, out: Path, digests: Digests, kept: dict[Path, Kept]) -> None:
        self.out, self.digests, self.kept = out, digests, kept
        self.folders: dict[Path, Path] = {}
        self.keys: dict[Path, str] = {}
        self.read = 0

    def __call__(self, run: RunDir, library: Library, chain: Chain | None) -> RunSummary:
        kept = self.kept.get(run.path)
        summary = kept.summary() if kept is not None else None
        if kept is not None and summary is not None:
            self.folders[run.path], self.keys[run.path] = kept.folder, kept.head.key
            return summary
        return self._read(run, library, chain)

    def pages(self, run: RunSummary, home: Path) -> Path:
        """The folder of a run's pages. Those of imported runs, of which all is known by now, are written here."""
        return self.folders.get(home) or write_run(run, RunDir(home), self.out)

    def _read(self, run: RunDir, library: Library, chain: Chain | None) -> RunSummary:
        before = self._key(run)
        whole = digest(run, library, chain)
        try:
            folder = self.folders[run.path] = write_run(whole, run, self.out)
        except AutorlError as error:
            raise Unwritten(error) from error
        short = whole.short()
        if before is not None:
            self._keep(run, before, short, folder)
        self.read += 1
        return short

    def _key(self, run: RunDir) -> str | None:
        try:
            return self.digests.key(run)
        except (OSError, ValueError):
            return None

    def _keep(self, run: RunDir, before: str, short: RunSummary, folder: Path) -> None:
        numbers = numbers_of(short)
        try:
            key = with_items(before, run, numbers, deep=short.damage is not None)
        except OSError:
            return
        self.digests.keep(folder, key, numbers, short)
        self.keys[run.path] = key


@contextmanager
def _rare_collections() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(OBJECTS_BEFORE_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
