"""What the parts of the recorder have in common: a moment, a watch that looks again and again, and lines in a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autorl_hpc.records.recorded import Seen


@dataclass(frozen=True)
class Moment:
    """Now, as records tell it."""

    elapsed_s: float
    at: str
    attempt: int

    def told(self) -> dict[str, float | str | int]:
        """The fields of `Seen`."""
        return {"elapsed_s": self.elapsed_s, "at": self.at, "attempt": self.attempt}


class Watch(Protocol):
    """One thing that is looked at every few seconds. What it raises is recorded, and it is looked at again later.

    Each watch is made and looked at in a thread of its own: what two of them share must bear that.
    """

    name: str
    every_s: float
    """Seconds between two looks; read after each, so that a watch may change its pace."""

    def look(self, now: Moment) -> None:
        """Looks once. Must not take long: the end of the recorder waits for it, three seconds at most."""
        ...

    def close(self, now: Moment) -> None:
        """The agent has ended: looks a last time and lets go."""
        ...


class Lines:
    """Appends records to a file, one JSON object a line; a line is whole or, after a crash, the last one is cut.

    Args:
        max_bytes: beyond it nothing is written any more, and `full` says so: an agent must not fill the disk through us.
    """

    def __init__(self, path: Path, max_bytes: int = 64 * 1024 * 1024) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.full = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._fd).st_size

    def add(self, *records: Seen) -> None:
        """Appends records; OSError is the caller's to survive."""
        data = b"".join(r.model_dump_json(exclude_defaults=True).encode() + b"\n" for r in records)
        if not data or self.full:
            return
        if self._size + len(data) > self.max_bytes:
            self.full = True
            return
        os.write(self._fd, data)
        self._size += len(data)

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._size

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)
