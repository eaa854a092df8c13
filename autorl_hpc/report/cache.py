"""What a digest depends on, as far as a look at names, sizes, inodes and times can tell: the key under which it is kept.

No time is compared with another: a stamp is equal to the one of before, or the run is read again. The ledger is not left to
times at all: its names are listed and its last entry is read and hashed, so an entry that was added is always seen. What
can't be seen is the inside of an older entry that was rewritten in place, with inode, size and both times as they were, or
through an NFS client that has not yet learned of it. The digest that is shown then is that of the entries before. `report
--fresh` reads all, and `verify` never looks at stamps.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from autorl_hpc import __version__
from autorl_hpc.errors import AutorlError, from_os_error
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.layout import PACKAGE, ExperimentDir, RunDir, share
from autorl_hpc.records import canonical_json
from autorl_hpc.records.recorded import RECORDED
from autorl_hpc.report.import_autorl_bench import META, SCORES, ReferenceFolders
from autorl_hpc.states import Split

if TYPE_CHECKING:
    from autorl_hpc.report.summary import RunSummary

Stamp = list[int] | None
"""Of one path: size, mtime_ns, ctime_ns and inode; a negative errno alone where it can't be looked at; None: it is not there."""

MADE_OF = (".py", ".j2", ".css", ".js")
"""Suffixes of files that a report is made of."""

ROOMS = ("records", "files", "report", "scoring")
"""Rooms whose code decides what a digest says."""


def stamp(path: Path | str) -> Stamp:
    """The stamp of what is at `path`, through links."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return [-(error.errno or 1)]
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


@cache
def code_stamp() -> str:
    """The package's version, and stamps of the files that make a report: whoever works on them sees his change."""
    folders = [*(PACKAGE / room for room in ROOMS), share("templates") / "report"]
    files = sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in MADE_OF)
    told = [[str(path), *_content_stamp(path)] for path in files]
    return hashlib.sha256(canonical_json([__version__, told])).hexdigest()


def _content_stamp(path: Path) -> list[int]:
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns]


def run_key(run: RunDir, bases: str) -> str:
    """The key of a run as it stands, but for its items.

    Args:
        bases: `bases_key` of its experiment.

    Raises:
        OSError, ValueError: run.json or the ledger can't be read right now.
    """
    home = str(run.path)
    names = [name for name in reading.list_names(run.ledger) if name.endswith(".json")]
    last = reading.read_bytes(run.ledger / names[-1]) if names else b""
    parts = [
        os.fsencode(home).hex(),
        hashlib.sha256(reading.read_bytes(run.record)).hexdigest(),
        [os.fsencode(name).hex() for name in (*names[:1], *names[-1:])],
        len(names),
        hashlib.sha256(last).hexdigest(),
        [stamp(f"{home}/{name}") for name in _watched()],
        bases,
    ]
    return hashlib.sha256(canonical_json(parts)).hexdigest()


def with_items(key: str, run: RunDir, numbers: Iterable[int], *, deep: bool = False) -> str:
    """A run's key with what its digest opened.

    Args:
        key: see `run_key`.
        numbers: submissions whose items files its digest opened.
        deep: stamps of every entry and items file too: of a damaged run, which somebody may repair in place.

    Raises:
        OSError: the run can't be listed right now.
    """
    home = str(run.items)  # no paths of objects: these lines run for every submission of every run
    items = [f"{home}/{number:06d}.{split.value}.jsonl.gz" for number in sorted(set(numbers)) for split in Split]
    folders = (run.ledger, run.items) if deep else ()
    deeper = [folder / name for folder in folders for name in reading.list_names(folder)]
    parts = [key, [stamp(path) for path in items], [stamp(path) for path in deeper]]
    return hashlib.sha256(canonical_json(parts)).hexdigest()


@cache
def _watched() -> list[str]:
    """Everything in a run's folder that a digest may look at, beside the items of single submissions; relative to it."""
    run = RunDir(Path())
    paths = [run.ledger, run.sealed_ledger, run.items, run.clock, run.logs, run.events, run.agent_log, run.agent_times]
    paths += [run.code_git, run.code_git / "refs" / "heads", run.workspace_link, run.driver_log]
    return [str(path) for path in (*paths, *(run.recorded(name) for name in RECORDED))]


def left_out_key(run: RunDir) -> str:
    """The key of a run that is in no report, for it can't be read or is a copy: it may become readable."""
    paths = [run.path, run.ledger, run.record, run.sealed_ledger]
    told = [os.fsencode(run.path).hex(), [stamp(path) for path in paths], [os.access(path, os.R_OK) for path in paths]]
    return hashlib.sha256(canonical_json(told)).hexdigest()


def imports_key(found: ReferenceFolders) -> str:
    """The key of results of AutoRL-Bench."""
    paths = [*(folder / name for folder in found.workspaces for name in (SCORES, META)), *found.tables]
    told = [[os.fsencode(path).hex(), stamp(path)] for path in paths]
    return hashlib.sha256(canonical_json(told)).hexdigest()


def bases_key(experiment: ExperimentDir) -> str:
    """The key of what the runs of an experiment share: the base models' scores."""
    try:
        names = reading.list_names(experiment.baselines)
    except OSError as error:
        names = [str(error.errno)]
    told = [[os.fsencode(name).hex(), stamp(experiment.baselines / name)] for name in names]
    return hashlib.sha256(canonical_json(told)).hexdigest()


# Names of a report's files, and where they lie: what a look at an earlier report needs, without what writes one.

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


OF_THE_CLUSTER = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE)
"""What may happen in any folder; all else comes of the path that was given."""


def make_given(out: Path) -> None:
    """Makes the folder that the user named for the report, before anything is read for it.

    Raises:
        AutorlError: it can't be made, or nothing can be written into it.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        if os.access(out, os.W_OK | os.X_OK):
            return
        why = os.strerror(errno.EACCES)
    except OSError as error:
        if error.errno in OF_THE_CLUSTER:
            raise from_os_error(error, "making the folder of the report", out) from error
        why = "a file of that name is there" if isinstance(error, FileExistsError) else error.strerror or str(error)
    raise AutorlError(
        f"the report can't be written there: {why}",
        where=out,
        next_step="give --out a folder that you may write to, or one that can be made",
    )


# Digests that are kept: of each run its summary in short, beside the run's pages, under the key of what it was made of.
#
# So the report over a whole runs/ folder finds what the report of each experiment has read already. A kept digest is no record:
# one that is damaged, of other code, or of a run that has changed since is made again, and nothing of it is used unless its own
# hash holds. It is taken from nobody else: only of files that belong to the user who reports. In a tree that was copied no key
# holds, for inodes and times of change are others there. `verify` reads none of this.

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
        from autorl_hpc.report.run_folder import genesis_of

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
