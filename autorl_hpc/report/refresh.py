"""A report brought up to date: runs that changed are read again one by one, the others come from what was kept of them.

One run at a time is held whole: its pages are written, its summary in short stays. So thousands fit into memory.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.layout import RunDir
from autorl_hpc.records.canonical import canonical_json
from autorl_hpc.report.chain import Chain
from autorl_hpc.report.charts.files import write_figures
from autorl_hpc.report.digest import Library, digest
from autorl_hpc.report.digests import Digests, Kept, numbers_of, own_bytes
from autorl_hpc.report.find import Found, find_runs
from autorl_hpc.report.merge import Unwritten, merge_found
from autorl_hpc.report.paper import read_paper
from autorl_hpc.report.stamps import Stamp, code_stamp, imports_key, left_out_key, stamp, with_items
from autorl_hpc.report.summary import MergedReport, RunSummary
from autorl_hpc.report.versus import compare
from autorl_hpc.report.write import (
    BESIDE,
    COMPARE_NAME,
    INDEX,
    RUN_PAGE,
    SUMMARY_NAME,
    write_merged,
    write_run,
    write_versus,
)
from autorl_hpc.states import RunState

STATE_NAME = ".report"
"""What the report beside it was made of."""

OVER = (RunState.FINISHED, RunState.DAMAGED)
"""States in which nothing is waited for."""

OUTPUTS = (
    *(SUMMARY_NAME, "summary.csv", "leaderboard.csv", "summary.md", INDEX),
    *(COMPARE_NAME, "compare.md", "compare.html", "figures/index.json"),
)
MAX_SUMMARY_BYTES = 1 << 32
"""Tens of kilobytes a run."""

OBJECTS_BEFORE_COLLECTION = 200_000
"""Records have no cycles, and a collector that looks through all of them every 700 takes a third of the time."""


@dataclass(frozen=True)
class Options:
    """How a report is made. What changes the merged report's files belongs here: a report with other options is another one.

    Attributes:
        fresh: everything is read, nothing that was kept is used.
        reload_s: the page asks the browser to load it again after so many seconds.
        paper: the published results stand beside ours.
        figures: PNG and SVG files are drawn too.
        compare: two sides that are set against each other.
    """

    fresh: bool = False
    reload_s: int | None = None
    paper: bool = False
    figures: bool = False
    compare: tuple[str, str] | None = None

    def key(self) -> str:
        """What the files of the report depend on."""
        told = {name: value for name, value in vars(self).items() if name != "fresh"}
        return hashlib.sha256(canonical_json(told)).hexdigest()


@dataclass
class Refreshed:
    """What a refresh did.

    Attributes:
        index: the path of index.html.
        merged: None if nothing had changed: then nothing was loaded.
        read: runs that were read.
        runs: runs in the report.
        live: those of them that are not over.
        left_out: how many things are not in the report.
    """

    index: Path
    merged: MergedReport | None
    read: int
    runs: int
    live: int
    left_out: int
    _state: dict[str, Any] = field(default_factory=dict)

    @property
    def changed(self) -> bool:
        """Whether anything was written."""
        return self.merged is not None

    def text(self, name: str, render: Callable[[MergedReport], str]) -> str:
        """A rendering of the merged report: as it was kept under this name if nothing has changed since, else by `render`."""
        texts = self._state.setdefault("texts", {})
        if self.merged is None and isinstance(texts.get(name), str):
            return str(texts[name])
        texts[name] = render(self.merged or self._loaded())
        _write_state(self.index.parent, self._state)
        return str(texts[name])

    def json_text(self, compared: bool = False) -> str:
        """summary.json, or compare.json."""
        name = COMPARE_NAME if compared else SUMMARY_NAME
        return reading.read_bytes(self.index.parent / name, max_bytes=MAX_SUMMARY_BYTES).decode()

    def _loaded(self) -> MergedReport:
        data = reading.read_bytes(self.index.parent / SUMMARY_NAME, max_bytes=MAX_SUMMARY_BYTES)
        folders = tuple(os.fsdecode(bytes.fromhex(path)) for path in self._state["folders"])
        return MergedReport.model_validate_json(data).model_copy(update={"run_folders": folders})


class _Taking:
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


def refresh(paths: list[Path], out: Path | None = None, options: Options = Options()) -> Refreshed:
    """Brings the report on all runs below `paths` up to date.

    Args:
        out: the report's folder; by default see `find.Found.out`.

    Raises:
        AutorlError: there is nothing to report on, or the folder can't be written.
    """
    found = find_runs(paths)
    out = (out or found.out).absolute()
    digests = Digests(out)
    kept: dict[Path, Kept] = {}
    if not options.fresh:
        kept = {run.path: one for run in found.runs if (one := digests.look(run)) is not None}
        before = _unchanged(out, found, kept, options)
        if before is not None:
            return _refreshed(out, None, 0, before)
    taking = _Taking(out, digests, kept)
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
    live = sum(run.state not in OVER for run in merged.runs)
    state: dict[str, Any] = {"left_out": len(merged.left_out), "live": live, "texts": {}}
    state["folders"] = [os.fsencode(folder).hex() for folder in merged.run_folders]
    ours = {Path(home) for run, home in zip(merged.runs, merged.run_folders, strict=True) if run.imported is None}
    if ours <= set(taking.keys):
        state |= {"key": _key(found, taking.keys, options), "outputs": _output_stamps(out)}
    _write_state(out, state)
    return _refreshed(out, merged, taking.read, state)


def _refreshed(out: Path, merged: MergedReport | None, read: int, state: dict[str, Any]) -> Refreshed:
    return Refreshed(out / INDEX, merged, read, len(state["folders"]), state["live"], state["left_out"], state)


def _key(found: Found, keys: dict[Path, str], options: Options) -> str:
    """The key over all runs, those that are left out among them."""
    runs = [[os.fsencode(run.path).hex(), keys.get(run.path) or left_out_key(run)] for run in found.runs]
    imports = [imports_key(place) for place in found.imports]
    told = [code_stamp(), options.key(), runs, imports, [left.model_dump(mode="json") for left in found.left_out]]
    return hashlib.sha256(canonical_json(told)).hexdigest()


def _unchanged(out: Path, found: Found, kept: dict[Path, Kept], options: Options) -> dict[str, Any] | None:
    """What was kept of the report in `out`, if it is the one that would be written now."""
    try:
        state = json.loads(own_bytes(out / STATE_NAME, reading.MAX_RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    keys = {path: one.head.key for path, one in kept.items()}
    if not isinstance(state, dict) or state.get("key") != _key(found, keys, options):
        return None
    if state.get("outputs") != _output_stamps(out):
        return None
    kinds = {"left_out": int, "live": int, "texts": dict, "folders": list}
    return state if all(type(state.get(name)) is kind for name, kind in kinds.items()) else None


def _output_stamps(out: Path) -> list[Stamp]:
    beside = [out / BESIDE / name / RUN_PAGE for name in reading.list_names(out / BESIDE)]
    return [stamp(path) for path in (*(out / name for name in OUTPUTS), *beside)]


def _write_state(out: Path, state: dict[str, Any]) -> None:
    try:
        atomic.write_bytes(out / STATE_NAME, canonical_json(state), durable=False)
    except OSError:
        pass


@contextmanager
def _rare_collections() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(OBJECTS_BEFORE_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
