"""The report's cache: digests (a run's short summary) kept beside each run's pages, under a key of the run's files.

A key is made of names, sizes, inodes and times (`stamp`), compared for equality only. The ledger's names and its last entry's
hash count too, so a new entry is always seen. Not seen: an older entry rewritten in place with equal size, inode and times, or
a change that an NFS client has not learned of. `report --fresh` reads everything; `verify` never uses the cache.
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
"""Of one path: [size, mtime_ns, ctime_ns, inode]; [-errno] if it can't be looked at; None if it does not exist."""

MADE_OF = (".py", ".j2", ".css", ".js")
"""Suffixes of the files that make a report."""

ROOMS = ("records", "files", "report", "scoring")
"""Packages whose code decides what a digest contains."""


def stamp(path: Path | str) -> Stamp:
    """Return the stamp of `path`, following links."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return [-(error.errno or 1)]
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


@cache
def code_stamp() -> str:
    """Hash the package's version and stamps of the files that make a report, so that a change to the code shows."""
    folders = [*(PACKAGE / room for room in ROOMS), share("templates") / "report"]
    files = sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in MADE_OF)
    told = [[str(path), *_content_stamp(path)] for path in files]
    return hashlib.sha256(canonical_json([__version__, told])).hexdigest()


def _content_stamp(path: Path) -> list[int]:
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns]


def run_key(run: RunDir, bases: str) -> str:
    """Return the key of a run's present state, without its items.

    Args:
        bases: `bases_key` of the run's experiment.

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
    """Return a run's key including the items files that its digest opened.

    Args:
        key: see `run_key`.
        numbers: submissions whose items files its digest opened.
        deep: include stamps of every entry and items file. For damaged runs, which may be repaired in place.

    Raises:
        OSError: the run can't be listed right now.
    """
    home = str(run.items)  # strings, not Paths: this runs for every submission of every run
    items = [f"{home}/{number:06d}.{split.value}.jsonl.gz" for number in sorted(set(numbers)) for split in Split]
    folders = (run.ledger, run.items) if deep else ()
    deeper = [folder / name for folder in folders for name in reading.list_names(folder)]
    parts = [key, [stamp(path) for path in items], [stamp(path) for path in deeper]]
    return hashlib.sha256(canonical_json(parts)).hexdigest()


@cache
def _watched() -> list[str]:
    """List the paths in a run's folder that a digest may read, relative to it, without the items of single submissions."""
    run = RunDir(Path())
    paths = [run.ledger, run.sealed_ledger, run.items, run.clock, run.logs, run.events, run.agent_log, run.agent_times]
    paths += [run.code_git, run.code_git / "refs" / "heads", run.workspace_link, run.driver_log]
    return [str(path) for path in (*paths, *(run.recorded(name) for name in RECORDED))]


def left_out_key(run: RunDir) -> str:
    """Return the key of a run that is left out (unreadable or a copy), so that a change is noticed."""
    paths = [run.path, run.ledger, run.record, run.sealed_ledger]
    told = [os.fsencode(run.path).hex(), [stamp(path) for path in paths], [os.access(path, os.R_OK) for path in paths]]
    return hashlib.sha256(canonical_json(told)).hexdigest()


def imports_key(found: ReferenceFolders) -> str:
    """Return the key of imported AutoRL-Bench results."""
    paths = [*(folder / name for folder in found.workspaces for name in (SCORES, META)), *found.tables]
    told = [[os.fsencode(path).hex(), stamp(path)] for path in paths]
    return hashlib.sha256(canonical_json(told)).hexdigest()


def bases_key(experiment: ExperimentDir) -> str:
    """Return the key of what an experiment's runs share: the base models' scores."""
    try:
        names = reading.list_names(experiment.baselines)
    except OSError as error:
        names = [str(error.errno)]
    told = [[os.fsencode(name).hex(), stamp(experiment.baselines / name)] for name in names]
    return hashlib.sha256(canonical_json(told)).hexdigest()


# --- names and places of a report's files

SUMMARY_NAME = "summary.json"
COMPARE_NAME = "compare.json"
RUN_PAGE = "run.html"
INDEX = "index.html"
BESIDE = "runs"
"""Folder beside the index for the pages of runs whose own folder can't be written."""

MAX_NAME_BYTES = 180
"""Longest run_id in the name of a folder beside the index; file systems allow 255 bytes."""


def elsewhere_of(out: Path, genesis: str, home: RunDir) -> Path:
    """Return the folder beside the index for a run whose own folder can't be written; `genesis` tells equal run_ids apart."""
    name = os.fsdecode(os.fsencode(home.run_id)[:MAX_NAME_BYTES])
    return out / BESIDE / f"{name}-{genesis[:8]}"


def link_to(folder: Path, out: Path) -> str:
    """Return the address of a run's page relative to `out`, percent-encoded: folder names may be invalid UTF-8."""
    return quote(os.fsencode(os.path.relpath(folder / RUN_PAGE, out)))


OF_THE_CLUSTER = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE)
"""Errors that may happen in any folder; all others are due to the path that the user gave."""


def make_given(out: Path) -> None:
    """Make the report's folder that the user named, before anything is read.

    Raises:
        AutorlError: the folder can't be made or written to.
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


# --- digests
# A digest is not a record: if it is damaged, of other code, of a changed run or of another user, it is made again. A copied
# tree has other inodes and ctimes, so no digest in it is used.

DIGEST_NAME = ".digest"
HEAD_BYTES = 16 * 1024
"""The first line of a digest file is far shorter."""

MAX_NUMBERS = 16
"""A digest opens the items of the selected submission and of an equal one before it."""

RUN_FILES = (SUMMARY_NAME, "run.md", RUN_PAGE)


class Head(NamedTuple):
    """The first line of a digest file.

    Attributes:
        key: see `with_items`.
        numbers: submissions whose items the digest opened.
        deep: see `with_items`.
        written: stamps of the run's pages when they were written.
        sha256: hash of the digest's bytes.
    """

    key: str
    numbers: list[int]
    deep: bool
    written: list[Stamp]
    sha256: str


@dataclass
class Kept:
    """A valid digest.

    Attributes:
        folder: holds the digest and the run's pages.
    """

    folder: Path
    head: Head

    def summary(self) -> RunSummary | None:
        """Return the short summary, or None if the bytes don't have the hash in the head."""
        try:
            data = own_bytes(self.folder / DIGEST_NAME, reading.MAX_RECORD_BYTES).partition(b"\n")[2]
            if hashlib.sha256(data).hexdigest() != self.head.sha256:
                return None
            return unpacked(data)
        except (OSError, ValueError):
            return None


class Digests:
    """The digests of all runs in one report."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._bases: dict[Path, str] = {}

    def look(self, run: RunDir) -> Kept | None:
        """Return a run's digest, or None if there is none or the run changed since."""
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
        """Return the key of a run as it is now, without its items. Take it before reading the run: then it fits no later state.

        Raises:
            OSError, ValueError: the run can't be read right now.
        """
        home = run.path.parent
        if home not in self._bases:
            self._bases[home] = bases_key(ExperimentDir(home))
        return run_key(run, self._bases[home])

    def keep(self, folder: Path, key: str, numbers: Sequence[int], data: bytes, *, deep: bool) -> None:
        """Write a digest beside the run's pages. A failure is ignored: it costs only time at the next report.

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
    """Return a short summary as bytes for the cache."""
    return short.model_dump_json().encode()


def unpacked(data: bytes) -> RunSummary:
    """Return the short summary that `packed` wrote.

    Raises:
        ValueError: the bytes are damaged or of another version.
    """
    from autorl_hpc.report.summary import RunSummary

    return RunSummary.model_validate_json(data).packed()


def numbers_of(summary: RunSummary) -> list[int]:
    """Return the submissions whose items a digest opened: the selected one, the equal one scored for it, those in its story."""
    chosen = next((point for point in summary.trajectory if point.submission_id == summary.selected), None)
    own = set() if chosen is None else {chosen.submission_id, chosen.same_as or chosen.submission_id}
    return sorted(own | set(summary.story.opened))


def own_bytes(path: Path, max_bytes: int) -> bytes:
    """Return the first `max_bytes` bytes of a file that belongs to this user.

    Raises:
        OSError, ValueError: it does not exist, is a link or not a regular file, or belongs to somebody else.
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
    """Return the first line of a digest file, or None if it is damaged, of other code or of another user."""
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
