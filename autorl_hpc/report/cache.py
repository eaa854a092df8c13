"""The report's cache: a run's short summary (`.digest`) beside its pages, under one key of the run's files (`run_key`).

A digest that is damaged, of other code, of a changed run or of another user is made again. Keys hold inodes and times, so that
none in a copied tree is used. Not seen: an older entry or an items file that was rewritten in place, or a change that an NFS client
has not learned of. `report --fresh` reads everything; `verify` never uses the cache.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from autorl_hpc import __version__
from autorl_hpc.errors import AutorlError
from autorl_hpc.files import atomic, reading
from autorl_hpc.files.layout import PACKAGE, ExperimentDir, RunDir, share
from autorl_hpc.records import canonical_json
from autorl_hpc.records.recorded import RECORDED
from autorl_hpc.report.import_autorl_bench import META, SCORES, ReferenceFolders
from autorl_hpc.report.pages import BESIDE, RUN_FILES, elsewhere_of
from autorl_hpc.report.run_folder import genesis_of
from autorl_hpc.report.summary import RunSummary

DIGEST_NAME = ".digest"
Stamp = list[int] | None
"""Of one path: [size, mtime_ns, ctime_ns, inode]; [-errno] if it can't be looked at; None if it does not exist."""

MADE_OF = (".py", ".j2", ".css", ".js")
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


def stamps_key(paths: Iterable[Path]) -> str:
    """Return a hash of the paths and their stamps."""
    return _hash([[os.fsencode(path).hex(), stamp(path)] for path in paths])


def _hash(value: object) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


@cache
def code_stamp() -> str:
    """Hash the package's version, and names, sizes and times of the files that make a report."""
    folders = [*(PACKAGE / room for room in ROOMS), share("templates") / "report"]
    files = sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in MADE_OF)
    return _hash([__version__, [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]])


def run_key(run: RunDir, bases: str) -> str:
    """Return the key of a run's present state: run.json, number, names and last of the ledger's entries, stamps of the rest.

    Args:
        bases: key of what the experiment's runs share, the base models' scores.

    Raises:
        OSError, ValueError: run.json or the ledger can't be read right now.
    """
    names = [name for name in reading.list_names(run.ledger) if name.endswith(".json")]
    last = reading.read_bytes(run.ledger / names[-1]) if names else b""
    contents = [hashlib.sha256(data).hexdigest() for data in (reading.read_bytes(run.record), last)]
    ends = [os.fsencode(name).hex() for name in (*names[:1], *names[-1:])]
    others = [stamp(f"{run.path}/{name}") for name in _watched()]
    return _hash([code_stamp(), os.fsencode(run.path).hex(), contents, len(names), ends, others, bases])


@cache
def _watched() -> list[str]:
    """Return the paths in a run's folder, relative to it, that its summary is made of besides run.json and entries."""
    run = RunDir(Path())
    paths = [run.ledger, run.sealed_ledger, run.items, run.clock, run.logs, run.events, run.agent_log, run.agent_times]
    paths += [run.code_git, run.code_git / "refs" / "heads", run.workspace_link, run.driver_log]
    return [str(path) for path in (*paths, *(run.recorded(name) for name in RECORDED))]


def left_out_key(run: RunDir) -> str:
    """Return the key of a run that is left out (unreadable or a copy), so that a change is noticed."""
    paths = [run.path, run.ledger, run.record, run.sealed_ledger]
    return _hash([stamps_key(paths), [os.access(path, os.R_OK) for path in paths]])


def imports_key(found: ReferenceFolders) -> str:
    """Return the key of imported AutoRL-Bench results."""
    return stamps_key([*(folder / name for folder in found.workspaces for name in (SCORES, META)), *found.tables])


class Kept(NamedTuple):
    """A valid digest: the folder with the run's pages, the run's key, and the packed summary."""

    folder: Path
    key: str
    data: bytes


class Digests:
    """The digests of all runs in one report."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._bases: dict[Path, str] = {}

    def look(self, run: RunDir) -> Kept | None:
        """Return a run's digest, or None if there is none or the run changed since."""
        found = self._look(run, run.report)
        if found is None and (self.out / BESIDE).is_dir():
            try:
                return self._look(run, elsewhere_of(self.out, genesis_of(run), run))
            except AutorlError:
                return None
        return found

    def _look(self, run: RunDir, folder: Path) -> Kept | None:
        try:
            head, _, data = own_bytes(folder / DIGEST_NAME).partition(b"\n")
            sealed, _, damaged = head.decode().partition(" ")
            key = self.key(run)
            key = _deep(key, run) if damaged else key
            return Kept(folder, key, data) if sealed == _seal(key, folder, data) else None
        except (OSError, ValueError):
            return None

    def key(self, run: RunDir) -> str:
        """Return the key of a run as it is now. Take it before reading the run: then it fits no later state.

        Raises:
            OSError, ValueError: the run can't be read right now.
        """
        home = run.path.parent
        if home not in self._bases:
            folder = ExperimentDir(home).baselines
            self._bases[home] = stamps_key(folder / name for name in reading.list_names(folder))
        return run_key(run, self._bases[home])

    def keep(self, folder: Path, key: str, run: RunDir, data: bytes, *, damaged: bool) -> str:
        """Write a digest beside the run's pages; return its key. If it can't be written, the next report reads the run again."""
        key = _deep(key, run) if damaged else key
        head = _seal(key, folder, data) + (" damaged" if damaged else "")
        try:
            atomic.write_bytes(folder / DIGEST_NAME, head.encode() + b"\n" + data, durable=False)
        except OSError:
            pass
        return key


def _deep(key: str, run: RunDir) -> str:
    """Return the key of a damaged run, which may be repaired in place."""
    return _hash([key, stamps_key(run.ledger / name for name in reading.list_names(run.ledger))])


def _seal(key: str, folder: Path, data: bytes) -> str:
    """Return a hash of a run's key, its pages as they are, and its digest's bytes."""
    return _hash([key, [stamp(f"{folder}/{name}") for name in RUN_FILES], hashlib.sha256(data).hexdigest()])


def packed(short: RunSummary) -> bytes:
    """Return a short summary as bytes for the cache."""
    return short.model_dump_json().encode()


def unpacked(data: bytes) -> RunSummary:
    """Return the short summary that `packed` wrote.

    Raises:
        ValueError: the bytes are damaged or of another version.
    """
    return RunSummary.model_validate_json(data).packed()


def own_bytes(path: Path) -> bytes:
    """Return the bytes of a file that belongs to this user.

    Raises:
        OSError, ValueError: it does not exist, is a link or not a regular file, or belongs to somebody else.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise ValueError(f"{path} is not a file of this user's")
        return file.read(reading.MAX_RECORD_BYTES)
