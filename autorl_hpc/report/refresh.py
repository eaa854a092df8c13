"""A report brought up to date: runs that changed are read again one by one, the others come from what was kept of them.

One run at a time is held whole: its pages are written, its summary in short stays. So thousands fit into memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autorl_hpc.files import atomic, reading
from autorl_hpc.records.canonical import canonical_json
from autorl_hpc.report.digests import Digests, Kept, own_bytes
from autorl_hpc.report.find import Found, find_runs
from autorl_hpc.report.outputs import BESIDE, COMPARE_NAME, INDEX, RUN_PAGE, SUMMARY_NAME, make_given
from autorl_hpc.report.stamps import Stamp, code_stamp, imports_key, left_out_key, stamp
from autorl_hpc.states import RunState

if TYPE_CHECKING:
    from autorl_hpc.report.summary import MergedReport

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
        from autorl_hpc.report.summary import MergedReport

        data = reading.read_bytes(self.index.parent / SUMMARY_NAME, max_bytes=MAX_SUMMARY_BYTES)
        folders = tuple(os.fsdecode(bytes.fromhex(path)) for path in self._state["folders"])
        return MergedReport.model_validate_json(data).model_copy(update={"run_folders": folders})


def refresh(paths: list[Path], out: Path | None = None, options: Options = Options()) -> Refreshed:
    """Brings the report on all runs below `paths` up to date.

    Args:
        out: the report's folder; by default see `find.Found.out`.

    Raises:
        AutorlError: there is nothing to report on, or the folder can't be written.
    """
    found = find_runs(paths)
    if out is not None:
        make_given(out)
    out = (out or found.out).absolute()
    digests = Digests(out)
    kept: dict[Path, Kept] = {}
    if not options.fresh:
        kept = {run.path: one for run in found.runs if (one := digests.look(run)) is not None}
        before = _unchanged(out, found, kept, options)
        if before is not None:
            return _refreshed(out, None, 0, before)
    from autorl_hpc.report.remake import remake  # what reads and draws takes longer to import than to look

    made = remake(found, out, digests, kept, options)
    merged = made.merged
    live = sum(run.state not in OVER for run in merged.runs)
    state: dict[str, Any] = {"left_out": len(merged.left_out), "live": live, "texts": {}}
    state["folders"] = [os.fsencode(folder).hex() for folder in merged.run_folders]
    ours = {Path(home) for run, home in zip(merged.runs, merged.run_folders, strict=True) if run.imported is None}
    if ours <= set(made.keys):
        state |= {"key": _key(found, made.keys, options), "outputs": _output_stamps(out)}
    _write_state(out, state)
    return _refreshed(out, merged, made.read, state)


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
