"""Digests that are kept: of each run its summary in short, beside the run's pages, under the key of what it was made of.

So the report over a whole runs/ folder finds what the report of each experiment has read already. A kept digest is no record:
one that is damaged, of other code, or of a run that has changed since is made again, and nothing of it is used unless its own
hash holds. It is taken from nobody else: only of files that belong to the user who reports. In a tree that was copied no key
holds, for inodes and times of change are others there. `verify` reads none of this.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.records.canonical import canonical_json
from autorl_hpc.report.outputs import BESIDE, RUN_PAGE, SUMMARY_NAME, elsewhere_of
from autorl_hpc.report.stamps import Stamp, bases_key, code_stamp, run_key, stamp, with_items

if TYPE_CHECKING:
    from autorl_hpc.report.summary import RunSummary

DIGEST_NAME = ".digest"
HEAD_BYTES = 16 * 1024
"""The first line of a kept digest is far shorter."""

MAX_NUMBERS = 16
"""A digest opens the items of the selected submission, and of an equal one before it."""

RUN_FILES = (SUMMARY_NAME, "run.md", RUN_PAGE)


class Head(NamedTuple):
    """The first line of a kept digest.

    Attributes:
        key: see `stamps.with_items`.
        numbers: submissions whose items it looked at.
        deep: see `stamps.with_items`.
        written: stamps of the pages beside it as they were written.
        sha256: of the digest's bytes.
    """

    key: str
    numbers: list[int]
    deep: bool
    written: list[Stamp]
    sha256: str


@dataclass
class Kept:
    """A digest that still stands.

    Attributes:
        folder: where it and the run's pages lie.
    """

    folder: Path
    head: Head

    def summary(self) -> RunSummary | None:
        """The summary in short; None if its bytes are not what was kept."""
        try:
            data = own_bytes(self.folder / DIGEST_NAME, reading.MAX_RECORD_BYTES).partition(b"\n")[2]
            if hashlib.sha256(data).hexdigest() != self.head.sha256:
                return None
            return unpacked(data)
        except (OSError, ValueError):
            return None


class Digests:
    """The digests of the runs in one report."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._bases: dict[Path, str] = {}

    def look(self, run: RunDir) -> Kept | None:
        """The digest of a run, if there is one and nothing that it was made of has changed."""
        return self._look(run, run.report) or self._beside(run)

    def _beside(self, run: RunDir) -> Kept | None:
        if not (self.out / BESIDE).is_dir():
            return None
        from autorl_hpc.report.chain import genesis_of

        try:
            return self._look(run, elsewhere_of(self.out, genesis_of(run), run))
        except AutorlError:
            return None

    def _look(self, run: RunDir, folder: Path) -> Kept | None:
        head = _read_head(folder / DIGEST_NAME)
        if head is None:
            return None
        try:
            now = with_items(self.key(run), run, head.numbers, deep=head.deep)
            if head.key != now or head.written != _page_stamps(folder):
                return None
        except (OSError, ValueError):
            return None
        return Kept(folder, head)

    def key(self, run: RunDir) -> str:
        """The key of a run as it stands now, but for its items. Taken before the run is read, it fits no later state.

        Raises:
            OSError, ValueError: it can't be read right now.
        """
        home = run.path.parent
        if home not in self._bases:
            self._bases[home] = bases_key(ExperimentDir(home))
        return run_key(run, self._bases[home])

    def keep(self, folder: Path, key: str, numbers: Sequence[int], data: bytes, *, deep: bool) -> None:
        """Keeps a digest beside the run's pages. That this fails costs time at the next report and nothing else.

        Args:
            numbers, deep: see `Head`.
            data: see `packed`.
        """
        head = Head(
            key=key,
            numbers=list(numbers),
            deep=deep,
            written=_page_stamps(folder),
            sha256=hashlib.sha256(data).hexdigest(),
        )
        line = canonical_json({**head._asdict(), "code": code_stamp()})
        try:
            atomic.write_bytes(folder / DIGEST_NAME, line + b"\n" + data, durable=False)
        except OSError:
            pass


def packed(short: RunSummary) -> bytes:
    """A summary in short as it is kept."""
    return short.model_dump_json().encode()


def unpacked(data: bytes) -> RunSummary:
    """What `packed` made these bytes of.

    Raises:
        ValueError: nothing of this version.
    """
    from autorl_hpc.report.summary import RunSummary

    return RunSummary.model_validate_json(data).packed()


def numbers_of(summary: RunSummary) -> list[int]:
    """The submissions whose items files a digest opened: the selected one, the equal one that was scored for it, and those that
    its story compares with the base model."""
    chosen = next((point for point in summary.trajectory if point.submission_id == summary.selected), None)
    own = set() if chosen is None else {chosen.submission_id, chosen.same_as or chosen.submission_id}
    return sorted(own | set(summary.story.opened))


def own_bytes(path: Path, max_bytes: int) -> bytes:
    """The first bytes of a file that belongs to this user.

    Raises:
        OSError, ValueError: it is not there, a link, no file, or somebody else's.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise ValueError(f"{path} is not a file of this user's")
        return file.read(max_bytes)


def _page_stamps(folder: Path) -> list[Stamp]:
    home = str(folder)
    return [stamp(f"{home}/{name}") for name in RUN_FILES]


def _read_head(path: Path) -> Head | None:
    """The first line of a kept digest, None if it is damaged, of other code, or none of ours."""
    try:
        line, end, _ = own_bytes(path, HEAD_BYTES).partition(b"\n")
        value = json.loads(line) if end else None
    except (OSError, ValueError, RecursionError):
        return None
    return _head(value)


def _head(value: Any) -> Head | None:
    if not isinstance(value, dict) or value.pop("code", None) != code_stamp() or set(value) != set(Head._fields):
        return None
    numbers = value["numbers"]
    if not isinstance(value["key"], str) or not isinstance(value["sha256"], str) or type(value["deep"]) is not bool:
        return None
    if not isinstance(numbers, list) or len(numbers) > MAX_NUMBERS:
        return None
    if not all(type(number) is int and 0 < number < 10**6 for number in numbers):
        return None
    return Head(**value)
