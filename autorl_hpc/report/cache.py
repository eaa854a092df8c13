"""The report's cache: a run's short summary (`.digest`) beside its pages, valid while the run's files have the same key.

Not noticed: an older entry or an items file that was rewritten in place. `report --fresh` reads everything; `verify` uses no cache.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
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
from autorl_hpc.report.pages import BESIDE, RUN_FILES, Writing, elsewhere_of
from autorl_hpc.report.run_folder import genesis_of
from autorl_hpc.report.summary import RunSummary

DIGEST_NAME = ".digest"
Stamp = list[int] | None
"""Of one path: [size, mtime_ns, ctime_ns, inode]; [-errno] if it can't be looked at; None if it does not exist."""

MADE_OF = (".py", ".j2", ".css", ".js")
ROOMS = ("records", "files", "report", "scoring")  # packages whose code decides what a digest contains


def stamp(path: Path) -> Stamp:
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
    return hashed([[os.fsencode(path).hex(), stamp(path)] for path in paths])


def hashed(value: object) -> str:
    """Return the hash of a value's JSON."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


@cache
def code_stamp() -> str:
    """Hash the package's version, and names, sizes and times of the files that make a report."""
    folders = [*(PACKAGE / room for room in ROOMS), share("templates") / "report"]
    files = sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in MADE_OF)
    return hashed([__version__, [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]])


def imports_key(found: ReferenceFolders) -> str:
    """Return the key of imported AutoRL-Bench results."""
    return stamps_key([*(folder / name for folder in found.workspaces for name in (SCORES, META)), *found.tables])


def left_out_key(run: RunDir) -> str:
    """Return the key of a run that is left out (unreadable or a copy), so that a change is noticed."""
    paths = [run.path, run.ledger, run.record, run.sealed_ledger]
    return hashed([stamps_key(paths), [os.access(path, os.R_OK) for path in paths]])


class Digest(NamedTuple):
    """A run's summary as it was kept: the folder of its pages, its key (None: not to be kept), the short summary as JSON."""

    folder: Path
    key: str | None
    data: bytes

    def summary(self) -> RunSummary:
        """Return the short summary."""
        return RunSummary.model_validate_json(self.data).packed()

    def keep(self) -> None:
        """Write the digest beside the run's pages; if that fails, the next report reads the run again."""
        if self.key is not None:
            with suppress(OSError):
                atomic.write_bytes(self.folder / DIGEST_NAME, self.seal() + b"\n" + self.data, durable=False)

    def seal(self) -> bytes:
        """Return the digest's first line: a hash of the key, the pages as they are, and the summary."""
        pages = [stamp(self.folder / name) for name in RUN_FILES]
        return hashed([self.key, pages, hashlib.sha256(self.data).hexdigest()]).encode()


class Digests:
    """The digests of all runs in one report, whose folder is `out`; `how`: the runs' pages are written."""

    def __init__(self, out: Path, how: Writing) -> None:
        self.out, self.how = out, how
        self._bases: dict[Path, str] = {}

    def look(self, run: RunDir) -> Digest | None:
        """Return a run's digest, or None if there is none or the run changed since."""
        with suppress(OSError, ValueError, AutorlError):
            key, folders = self.key(run), [] if self.how.whole else [run.report]
            if (self.out / BESIDE).is_dir():
                folders.append(elsewhere_of(self.out, genesis_of(run), run))
            for folder in folders:
                with suppress(OSError, ValueError):
                    seal, _, data = own_bytes(folder / DIGEST_NAME).partition(b"\n")
                    found = Digest(folder, key, data)
                    if found.seal() == seal:
                        return found
        return None

    def key(self, run: RunDir) -> str:
        """Return the key of a run as it is now: run.json, number, names and last of its entries, stamps of the rest.
        Take it before reading the run: then it fits no later state. OSError, ValueError: the run can't be read right
        now."""
        home = run.path.parent
        if home not in self._bases:
            folder = ExperimentDir(home).baselines
            self._bases[home] = stamps_key(folder / name for name in reading.list_names(folder))
        names = [name for name in reading.list_names(run.ledger) if name.endswith(".json")]
        last = reading.read_bytes(run.ledger / names[-1]) if names else b""
        contents = [hashlib.sha256(data).hexdigest() for data in (reading.read_bytes(run.record), last)]
        ends = [os.fsencode(name).hex() for name in (*names[:1], *names[-1:])]
        paths = [run.ledger, run.sealed_ledger, run.items, run.clock, run.logs, run.events, run.agent_log]
        paths += [run.agent_times, run.code_git, run.code_git / "refs" / "heads", run.workspace_link, run.driver_log]
        others = stamps_key([*paths, *map(run.recorded, RECORDED)])
        return hashed([code_stamp(), self.how.light, contents, len(names), ends, others, self._bases[home]])


def own_bytes(path: Path) -> bytes:
    """Return the bytes of a file that belongs to this user. Raises OSError, ValueError: it does not exist, is a link or
    not a regular file, or belongs to somebody else."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise ValueError(f"{path} is not a file of this user's")
        return file.read(reading.MAX_RECORD_BYTES)
