"""Reads what the recorder wrote: files that may be absent, damaged, half-written, of a newer version, or huge.

No file is trusted to be sound and none is needed: what can't be read is said and left out.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from autorl_hpc.files.layout import RunDir
from autorl_hpc.records.recorded import (
    CodeRevision,
    ProcessSeen,
    Seen,
    TraceEvent,
    TrainingPoint,
)
from autorl_hpc.report.telling.used import Used

MAX_BYTES = 64 * 1024 * 1024
"""As much as the recorder writes into one file; what lies beyond it was not written by a recorder of ours."""

CHUNK_BYTES = 4 * 1024 * 1024
MAX_LINES = 20_000
"""Lines of gauges and training steps that are kept of one file: one every 5 s for more than a day. Of more, every
second, fourth, ... one is read. Other files are told whole, since each of their lines counts."""

MAX_LINE_BYTES = 64 * 1024
"""A longer line is no line of the recorder's."""

SeenT_co = TypeVar("SeenT_co", bound=Seen | Used, covariant=True)


class _Trace(TraceEvent):  # as the record, but it passes over fields of a newer version; so do those below
    model_config = ConfigDict(extra="ignore")


class _Process(ProcessSeen):
    model_config = ConfigDict(extra="ignore")


class _Point(TrainingPoint):
    model_config = ConfigDict(extra="ignore")


class _Revision(CodeRevision):
    model_config = ConfigDict(extra="ignore")


@dataclass(frozen=True)
class Lines(Generic[SeenT_co]):
    """The lines of one file.

    Attributes:
        present: the file is there: the recorder ran.
        every: of a long file, every so many-th line, and the last.
        troubles: what could not be read, for people.
    """

    records: tuple[SeenT_co, ...] = ()
    present: bool = False
    every: int = 1
    troubles: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recorded:
    """All files of the recorder of one run."""

    trace: Lines[TraceEvent] = Lines()
    usage: Lines[Used] = Lines()
    processes: Lines[ProcessSeen] = Lines()
    training: Lines[TrainingPoint] = Lines()
    revisions: Lines[CodeRevision] = Lines()

    @property
    def troubles(self) -> tuple[str, ...]:
        """What could not be read of any of them."""
        every: Sequence[Lines[Any]] = (self.trace, self.usage, self.processes, self.training, self.revisions)
        return tuple(trouble for lines in every for trouble in lines.troubles)


def read_recorded(run: RunDir) -> Recorded:
    """What the recorder wrote about a run; all empty where there was none."""
    return Recorded(
        trace=read_lines(run.recorded("trace"), _Trace),
        usage=read_lines(run.recorded("usage"), Used, thin=True),
        processes=read_lines(run.recorded("processes"), _Process),
        training=read_lines(run.recorded("training"), _Point, thin=True),
        revisions=read_lines(run.recorded("revisions"), _Revision),
    )


def read_lines(path: Path, model: type[SeenT_co], *, thin: bool = False) -> Lines[SeenT_co]:
    """The lines of one file as records, in the order of the file.

    Args:
        thin: of more than MAX_LINES lines, only every second, fourth, ... one and the last are kept.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return Lines()
    except OSError as error:
        return Lines(troubles=(f"{path.name} can't be read: {error.strerror}",))
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        return Lines(troubles=(f"{path.name} is no file",))
    with os.fdopen(descriptor, "rb") as file:
        reader = _Reader(path.name, model, _every(file.fileno(), status.st_size) if thin else 1)
        try:
            for block in _blocks(file, status.st_size):
                reader.take(block)
        except OSError as error:
            reader.troubles.append(f"{path.name} can't be read to its end: {error.strerror}")
    return reader.lines(status.st_size)


def _every(descriptor: int, size: int) -> int:
    """1, 2, 4, ...: which lines of a file are kept, by the length of its first lines."""
    head = os.pread(descriptor, CHUNK_BYTES // 16, 0)
    lines = min(size, MAX_BYTES) * head.count(b"\n") / max(len(head), 1)
    every = 1
    while lines / every > MAX_LINES:
        every *= 2
    return every


def _blocks(file: Any, size: int) -> Iterator[list[bytes]]:
    """Whole lines, some MB at a time; a last one without an end is one that was cut. `size` was that of the file."""
    rest, total, step = b"", 0, min(CHUNK_BYTES, size + 1)
    while total < MAX_BYTES and (data := file.read(min(step, MAX_BYTES - total))):
        total += len(data)
        *lines, rest = (rest + data).split(b"\n")
        yield lines
        if len(rest) > CHUNK_BYTES:
            rest = b"x"  # a line without an end: not kept, and counted as one that can't be read
    yield [rest]


class _Reader(Generic[SeenT_co]):
    """Collects the records of one file."""

    def __init__(self, name: str, model: type[SeenT_co], every: int) -> None:
        self.name = name
        self._one, self._many = _adapters(model)  # type: ignore[arg-type]  # a class is hashable
        self.every = every
        self.records: list[SeenT_co] = []
        self.troubles: list[str] = []
        self._bad = 0
        self._number = 0
        self._left: bytes | None = None

    def take(self, block: list[bytes]) -> None:
        """Adds the lines of one block."""
        kept = []
        for line in block:
            if line:
                self._number += 1
                is_kept = self.every == 1 or self._number % self.every == 1
                self._left = None if is_kept else line
                if is_kept:
                    kept.append(line)
        if not kept:
            return
        try:
            self.records += self._many.validate_json(b"[" + b",".join(kept) + b"]")
        except ValidationError:
            self._one_by_one(kept)

    def _one_by_one(self, lines: list[bytes]) -> None:
        for line in lines:
            if len(line) > MAX_LINE_BYTES:
                self._bad += 1
                continue
            try:
                self.records.append(self._one.validate_json(line))
            except ValidationError:
                self._bad += 1

    def lines(self, size: int) -> Lines[SeenT_co]:
        """What was collected, and the last line."""
        if self._left is not None:
            self._one_by_one([self._left])
        if self._bad:
            words = "1 line" if self._bad == 1 else f"{self._bad} lines"
            self.troubles.append(f"{words} of {self.name} can't be read: cut, damaged or of a newer version")
        if size > MAX_BYTES:
            self.troubles.append(f"{self.name} has {size} bytes: only the first {MAX_BYTES} were read")
        if self.every > 1:
            self.troubles.append(f"{self.name} is long: of its lines every {self.every}th was read")
        return Lines(tuple(self.records), True, self.every, tuple(self.troubles))


@cache
def _adapters(model: Any) -> tuple[TypeAdapter[Any], TypeAdapter[Any]]:
    """For one line, and for a list of them."""
    return TypeAdapter(model), TypeAdapter(list[model])
