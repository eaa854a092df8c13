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

from autorl_hpc.files import atomic, reading
from autorl_hpc.files.layout import RunDir
from autorl_hpc.records.canonical import canonical_json
from autorl_hpc.report.chain import Chain
from autorl_hpc.report.digest import Library, digest
from autorl_hpc.report.digests import FOLDER, Digests, Kept, numbers_of
from autorl_hpc.report.find import Found, find_runs
from autorl_hpc.report.merge import merge_found
from autorl_hpc.report.stamps import Stamp, code_stamp, left_out_key, stamp
from autorl_hpc.report.summary import MergedReport, RunSummary
from autorl_hpc.report.write import INDEX, SUMMARY_NAME, write_merged, write_run

STATE = "report.json"
"""In the folder of the digests: what the report beside it was made of."""

OUTPUTS = (SUMMARY_NAME, "summary.csv", "summary.md", INDEX)
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
    """

    fresh: bool = False
    reload_s: int | None = None

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
        kept: runs of which nothing had changed.
        left_out: how many things are not in the report.
    """

    index: Path
    merged: MergedReport | None
    read: int
    kept: int
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

    def _read(self, run: RunDir, library: Library, chain: Chain | None) -> RunSummary:
        before = self._key(run, [])
        whole = digest(run, library, chain)
        numbers = numbers_of(whole)
        key = self._key(run, numbers, deep=whole.damage is not None)
        folder = self.folders[run.path] = write_run(whole, run, self.out)
        short = whole.short()
        if before is not None and key is not None and before == self._key(run, []):  # it did not change meanwhile
            self.digests.keep(run, key, numbers, short, folder)
            self.keys[run.path] = key
        self.read += 1
        return short

    def _key(self, run: RunDir, numbers: list[int], *, deep: bool = False) -> str | None:
        try:
            return self.digests.key(run, numbers, deep=deep)
        except (OSError, ValueError):
            return None


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
        state = _unchanged(out, found, kept, options)
        if state is not None:
            return Refreshed(out / INDEX, None, 0, len(kept), int(state["left_out"]), state)
    taking = _Taking(out, digests, kept)
    with _rare_collections():
        merged = merge_found(found, taking)
        folders = [taking.folders[Path(folder)] for folder in merged.run_folders]
        index = write_merged(merged, folders, out, options.reload_s)
    digests.forget_others(found.runs)
    state: dict[str, Any] = {"left_out": len(merged.left_out), "texts": {}}
    state["folders"] = [os.fsencode(folder).hex() for folder in merged.run_folders]
    if set(map(Path, merged.run_folders)) <= set(taking.keys):
        state |= {"key": _key(found, taking.keys, options), "outputs": _output_stamps(out)}
    _write_state(out, state)
    return Refreshed(index, merged, taking.read, len(merged.runs) - taking.read, len(merged.left_out), state)


def _key(found: Found, keys: dict[Path, str], options: Options) -> str:
    """The key over all runs, those that are left out among them."""
    runs = [[os.fsencode(run.path).hex(), keys.get(run.path) or left_out_key(run)] for run in found.runs]
    told = [code_stamp(), options.key(), runs, [left.model_dump(mode="json") for left in found.left_out]]
    return hashlib.sha256(canonical_json(told)).hexdigest()


def _unchanged(out: Path, found: Found, kept: dict[Path, Kept], options: Options) -> dict[str, Any] | None:
    """What was kept of the report in `out`, if it is the one that would be written now."""
    try:
        state = json.loads(reading.read_bytes(out / FOLDER / STATE))
    except (OSError, ValueError, RecursionError):
        return None
    keys = {path: one.head.key for path, one in kept.items()}
    if not isinstance(state, dict) or state.get("key") != _key(found, keys, options):
        return None
    if state.get("outputs") != _output_stamps(out) or type(state.get("left_out")) is not int:
        return None
    return state if isinstance(state.get("texts"), dict) else None


def _output_stamps(out: Path) -> list[Stamp]:
    return [stamp(out / name) for name in OUTPUTS]


def _write_state(out: Path, state: dict[str, Any]) -> None:
    try:
        (out / FOLDER).mkdir(exist_ok=True)
        atomic.write_bytes(out / FOLDER / STATE, canonical_json(state), durable=False)
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
