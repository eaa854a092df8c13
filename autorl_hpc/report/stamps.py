"""What a digest depends on, as far as a look at names, sizes, inodes and times can tell: the key under which it is kept.

No time is compared with another: a stamp is equal to the one of before, or the run is read again. The ledger is not left to
times at all: its names are listed and its last entry is read and hashed, so an entry that was added is always seen. What
can't be seen is the inside of an older entry that was rewritten in place, with inode, size and both times as they were, or
through an NFS client that has not yet learned of it. The digest that is shown then is that of the entries before. `report
--fresh` reads all, and `verify` never looks at stamps.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from autorl_hpc import __version__
from autorl_hpc.files import reading
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.share import PACKAGE, share
from autorl_hpc.records.canonical import canonical_json
from autorl_hpc.records.recorded import RECORDED
from autorl_hpc.report.reference import META, SCORES, ReferenceFolders
from autorl_hpc.states import Split

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
