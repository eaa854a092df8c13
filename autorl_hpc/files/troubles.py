"""Notes on entries of the queue that failed: how often, why, whose fault. They outlive graders, so that the next one waits as long
as the last one would have, and `status` can say what a run waits for."""

from __future__ import annotations

from pathlib import Path

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import atomic, reading
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.exchange import Trouble

SUFFIX = ".json"
MAX_CHARS = 1000


def read_trouble(folder: Path, entry: str) -> Trouble | None:
    """The note on an entry, None where there is none that can be read."""
    path = folder / f"{entry}{SUFFIX}"
    try:
        return parse_record(Trouble, reading.read_json(path), path)
    except (AutorlError, OSError, ValueError):
        return None


def read_troubles(folder: Path) -> list[Trouble]:
    """All notes, by entry."""
    names = [name[: -len(SUFFIX)] for name in reading.list_names(folder) if name.endswith(SUFFIX)]
    return [trouble for name in sorted(names) if (trouble := read_trouble(folder, name)) is not None]


def write_trouble(folder: Path, trouble: Trouble) -> None:
    """Replaces the note. One that can't be written is no error: it is told in the log, too."""
    try:
        folder.mkdir(exist_ok=True)
        atomic.write_bytes(folder / f"{trouble.entry}{SUFFIX}", trouble.canonical() + b"\n")
    except OSError:
        pass


def drop_trouble(folder: Path, entry: str) -> None:
    """Removes the note of an entry that came through."""
    atomic.unlink_quietly(folder / f"{entry}{SUFFIX}")
