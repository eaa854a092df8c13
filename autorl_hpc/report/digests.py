"""Digests that are kept: of each run its summary in short, in the report's own folder, under the key of what it was made of.

A kept digest is no record. One that is damaged, of other code, or of a run that has changed since is made again; nothing of it
is used unless its own hash holds. Who can write here can write the report beside it: `verify` reads neither.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from autorl_hpc.files import atomic, reading
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.records.canonical import canonical_json
from autorl_hpc.report.stamps import Stamp, bases_key, code_stamp, run_key, stamp
from autorl_hpc.report.summary import RunSummary
from autorl_hpc.report.write import BESIDE, RUN_PAGE, SUMMARY_NAME

FOLDER = ".digests"
HEAD_BYTES = 16 * 1024
"""The first line of a kept digest is far shorter."""

MAX_NUMBERS = 16
"""A digest opens the items of the selected submission, and of an equal one before it."""

RUN_FILES = (SUMMARY_NAME, "run.md", RUN_PAGE)


class Head(NamedTuple):
    """The first line of a kept digest.

    Attributes:
        key: see `stamps.run_key`.
        numbers: submissions whose items it looked at.
        deep: see `stamps.run_key`.
        beside: the folder of the run's pages beside the index; None: they lie in the run.
        written: stamps of these pages as they were written.
        sha256: of the digest's bytes.
    """

    key: str
    numbers: list[int]
    deep: bool
    beside: str | None
    written: list[Stamp]
    sha256: str


@dataclass
class Kept:
    """A digest that still stands.

    Attributes:
        folder: where the run's pages lie.
    """

    path: Path
    head: Head
    folder: Path

    def summary(self) -> RunSummary | None:
        """The summary in short; None if its bytes are not what was kept."""
        try:
            data = reading.read_bytes(self.path).partition(b"\n")[2]
            if hashlib.sha256(data).hexdigest() != self.head.sha256:
                return None
            return RunSummary.model_validate_json(data)
        except (OSError, ValueError, ValidationError):
            return None


class Digests:
    """The digests that are kept in one report's folder."""

    def __init__(self, out: Path) -> None:
        self.out, self.folder = out, out / FOLDER
        self._bases: dict[Path, str] = {}

    def look(self, run: RunDir) -> Kept | None:
        """The digest of a run, if there is one and nothing that it was made of has changed."""
        path = self._path(run)
        head = _read_head(path)
        if head is None:
            return None
        try:
            if head.key != self.key(run, head.numbers, deep=head.deep):
                return None
            pages = run.report if head.beside is None else self.out / BESIDE / head.beside
            return Kept(path, head, pages) if _page_stamps(pages) == head.written else None
        except (OSError, ValueError):
            return None

    def key(self, run: RunDir, numbers: Sequence[int], *, deep: bool = False) -> str:
        """The key of a run as it stands now; take it before the run is read.

        Raises:
            OSError, ValueError: it can't be read right now.
        """
        home = run.path.parent
        if home not in self._bases:
            self._bases[home] = bases_key(ExperimentDir(home))
        return run_key(run, numbers, self._bases[home], deep=deep)

    def keep(self, run: RunDir, key: str, numbers: Sequence[int], summary: RunSummary, pages: Path) -> None:
        """Keeps a digest. That this fails (no space, no permission) costs time at the next report and nothing else."""
        data = summary.model_dump_json().encode()
        head = Head(
            key=key,
            numbers=list(numbers),
            deep=summary.damage is not None,
            beside=None if pages == run.report else pages.name,
            written=_page_stamps(pages),
            sha256=hashlib.sha256(data).hexdigest(),
        )
        line = canonical_json({**head._asdict(), "code": code_stamp()})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic.write_bytes(self._path(run), line + b"\n" + data, durable=False)
        except OSError:
            pass

    def forget_others(self, runs: Sequence[RunDir]) -> None:
        """Removes the digests of runs that are no longer below the given folders."""
        wanted = {self._path(run).name for run in runs}
        try:
            for name in set(reading.list_names(self.folder)) - wanted:
                if name.endswith(".digest"):
                    atomic.unlink_quietly(self.folder / name)
        except OSError:
            pass

    def _path(self, run: RunDir) -> Path:
        return self.folder / f"{hashlib.sha256(os.fsencode(run.path)).hexdigest()[:32]}.digest"


def numbers_of(summary: RunSummary) -> list[int]:
    """The submissions whose items files a digest opened: the selected one, the equal one that was scored for it, and those that
    its story compares with the base model."""
    chosen = next((point for point in summary.trajectory if point.submission_id == summary.selected), None)
    own = set() if chosen is None else {chosen.submission_id, chosen.same_as or chosen.submission_id}
    return sorted(own | set(summary.story.opened))


def _page_stamps(folder: Path) -> list[Stamp]:
    return [stamp(folder / name) for name in RUN_FILES]


def _read_head(path: Path) -> Head | None:
    """The first line of a kept digest, None if it is damaged, of other code, or none of ours."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            line, end, _ = os.read(fd, HEAD_BYTES).partition(b"\n")
        finally:
            os.close(fd)
        value = json.loads(line) if end else None
    except (OSError, ValueError, RecursionError):
        return None
    return _head(value)


def _head(value: Any) -> Head | None:
    if not isinstance(value, dict) or value.pop("code", None) != code_stamp() or set(value) != set(Head._fields):
        return None
    numbers, beside = value["numbers"], value["beside"]
    if not isinstance(value["key"], str) or not isinstance(value["sha256"], str) or type(value["deep"]) is not bool:
        return None
    if beside is not None and (not isinstance(beside, str) or "/" in beside or beside in ("", ".", "..")):
        return None
    if not isinstance(numbers, list) or len(numbers) > MAX_NUMBERS:
        return None
    if not all(type(number) is int and 0 < number < 10**6 for number in numbers):
        return None
    return Head(**value)
