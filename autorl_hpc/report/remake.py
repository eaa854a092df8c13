"""The report made anew: runs that changed are read one by one and their pages written, the others come from what was kept.

One run at a time is held whole: its pages are written, its summary in short stays. So thousands fit into memory.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import RunDir
from autorl_hpc.records.canonical import canonical_json
from autorl_hpc.report.chain import Chain
from autorl_hpc.report.charts.files import write_figures
from autorl_hpc.report.digest import Library, digest
from autorl_hpc.report.digests import Digests, Kept, numbers_of, packed, unpacked
from autorl_hpc.report.find import Found
from autorl_hpc.report.merge import Chosen, merge_found
from autorl_hpc.report.paper import read_paper
from autorl_hpc.report.stamps import with_items
from autorl_hpc.report.summary import MergedReport, RunSummary
from autorl_hpc.report.versus import compare
from autorl_hpc.report.workers import beside, shared_out, workers_for
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
        with ExitStack() as stack:
            if options.figures:
                draw = partial(write_figures, merged, out)
                stack.enter_context(beside(draw, forked=workers_for(len(merged.runs)) > 0))
            write_merged(merged, folders, out, options.reload_s)
            if versus is not None:
                write_versus(versus, out)
    return Made(merged, taking.keys, taking.read)


class Taking:
    """How `merge` takes runs here: from their digests, else by reading them and writing their pages, on all cores."""

    def __init__(self, out: Path, digests: Digests, kept: dict[Path, Kept]) -> None:
        self.out, self.digests, self.kept = out, digests, kept
        self.folders: dict[Path, Path] = {}
        self.keys: dict[Path, str] = {}
        self.read = 0

    def __call__(self, runs: Sequence[Chosen], library: Library) -> Iterator[RunSummary | Exception]:
        """See `merge.Take`."""
        shared = [run for run, chain in runs if chain is None and run.path not in self.kept]
        here = set(shared[:1])  # so that what reading loads and compiles is loaded once, before there are workers
        shared = shared[1:]
        with ExitStack() as stack:
            answers: Iterator[bytes | None] | None = None
            for run, chain in runs:
                if run.path in self.kept or chain is not None or run in here:
                    yield self._taken(run, library, chain)
                    continue
                if answers is None:
                    work = partial(self._answer, shared, library)
                    answers = stack.enter_context(shared_out(work, len(shared), workers_for(len(shared))))
                answer = next(answers)
                yield self._taken(run, library, None) if answer is None else self._told(run, answer)

    def pages(self, run: RunSummary, home: Path) -> Path:
        """The folder of a run's pages. Those of imported runs, of which all is known by now, are written here."""
        return self.folders.get(home) or write_run(run, RunDir(home), self.out)

    def _taken(self, run: RunDir, library: Library, chain: Chain | None) -> RunSummary | Exception:
        kept = self.kept.get(run.path)
        summary = kept.summary() if kept is not None else None
        if kept is not None and summary is not None:
            self.folders[run.path], self.keys[run.path] = kept.folder, kept.head.key
            return summary
        before = self._key(run)
        try:
            whole = digest(run, library, chain)
        except Exception as error:
            return error
        try:
            return self._written(run, whole, before)[0]
        except AutorlError:
            raise
        except Exception as error:  # a defect in what draws it costs the other runs nothing
            return error

    def _answer(self, runs: Sequence[RunDir], library: Library, number: int) -> bytes:
        """What a worker says of a run that it has read."""
        run = runs[number]
        before = self._key(run)
        _, data = self._written(run, digest(run, library), before)
        told = {"folder": os.fsencode(self.folders[run.path]).hex(), "key": self.keys.get(run.path)}
        return canonical_json(told) + b"\n" + data

    def _told(self, run: RunDir, answer: bytes) -> RunSummary:
        """The summary of a run that a worker has read."""
        line, _, data = answer.partition(b"\n")
        told = json.loads(line)
        self.folders[run.path] = Path(os.fsdecode(bytes.fromhex(told["folder"])))
        if told["key"] is not None:
            self.keys[run.path] = told["key"]
        self.read += 1
        return unpacked(data)

    def _written(self, run: RunDir, whole: RunSummary, before: str | None) -> tuple[RunSummary, bytes]:
        """Writes a run's pages and keeps its digest; the summary in short, and as it was kept.

        Args:
            before: the run's key, taken before it was read; None: it had none.

        Raises:
            AutorlError: the pages can't be written.
        """
        folder = self.folders[run.path] = write_run(whole, run, self.out)
        short = whole.short()
        data = packed(short)
        numbers, deep = numbers_of(short), short.damage is not None
        if before is not None:
            with suppress(OSError):
                key = with_items(before, run, numbers, deep=deep)
                self.digests.keep(folder, key, numbers, data, deep=deep)
                self.keys[run.path] = key
        self.read += 1
        return short, data

    def _key(self, run: RunDir) -> str | None:
        try:
            return self.digests.key(run)
        except (OSError, ValueError):
            return None


@contextmanager
def _rare_collections() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(OBJECTS_BEFORE_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
