"""Read what the recorder wrote (traces, usage, processes, training, revisions), agent.log by budget time, and events.jsonl.

Any file may be absent, damaged, half-written, of a newer version or huge. What can't be read is reported and left out.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from autorl_hpc.files.layout import RunDir
from autorl_hpc.records.recorded import CodeRevision, ProcessSeen, Seen, TraceEvent, TrainingPoint
from autorl_hpc.report.run_story.failures import LogExcerpt

# --- usage samples
# As plain dictionaries with the needed fields only: a run has up to twenty thousand, and as records they take twice the time.

MOST_S = 1e9
"""Thirty years: a bound, because a damaged line would otherwise become the run's peak."""

MOST_CPU_S = 1e13
MOST_MEMORY_BYTES, MOST_DISK_BYTES = 1 << 50, 1 << 60

Figure = Annotated[float, Field(ge=0, le=MOST_S)]


class UsedGpu(TypedDict):
    """The needed fields of `GpuSample`."""

    __pydantic_config__ = ConfigDict(extra="ignore", allow_inf_nan=False)  # type: ignore[misc]

    name: NotRequired[str]
    used_share: NotRequired[Annotated[float, Field(ge=0, le=1)] | None]


class UsageLine(TypedDict):
    """The needed fields of `UsageSample`, with its bounds and those above; null or absent: not measured."""

    __pydantic_config__ = ConfigDict(extra="ignore", allow_inf_nan=False)  # type: ignore[misc]

    elapsed_s: Figure
    attempt: NotRequired[Annotated[int, Field(ge=1)]]
    cpu_s: NotRequired[Annotated[float, Field(ge=0, le=MOST_CPU_S)] | None]
    memory_bytes: NotRequired[Annotated[int, Field(ge=0, le=MOST_MEMORY_BYTES)] | None]
    disk_bytes: NotRequired[Annotated[int, Field(ge=0, le=MOST_DISK_BYTES)] | None]
    gpus: NotRequired[tuple[UsedGpu, ...] | None]


MAX_BYTES = 64 * 1024 * 1024
"""The recorder's own limit per file."""

CHUNK_BYTES = 4 * 1024 * 1024
MAX_LINES = 20_000
"""Lines kept of a file of gauges or training steps: one every 5 s for more than a day. Of longer files every second, fourth, ...
line is kept. Other files are read whole, since each of their lines counts."""

MAX_LINE_BYTES = 64 * 1024
"""The recorder writes no longer lines."""

SeenT_co = TypeVar("SeenT_co", bound=Seen | UsageLine, covariant=True)


MOST_TOKENS, MOST_USD, MOST_CALLS = 10**13, 1e9, 10**9
"""Bounds for one event, because a damaged line would otherwise dominate the sums."""

Seconds = Annotated[float, Field(ge=0, le=MOST_S)]
Tokens = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
Calls = Annotated[int, Field(ge=0, le=MOST_CALLS)]


class _Trace(TraceEvent):  # ignores fields of newer versions, unlike the record; so do the classes below
    model_config = ConfigDict(extra="ignore")
    elapsed_s: Seconds
    tokens_in: Tokens | None = None
    tokens_out: Tokens | None = None
    tokens_cached: Tokens | None = None
    cost_usd: Annotated[float, Field(ge=0, le=MOST_USD)] | None = None
    calls: Calls | None = None
    tool_calls: Calls | None = None
    tool_failures: Calls | None = None
    duration_s: Seconds | None = None


class _Process(ProcessSeen):
    model_config = ConfigDict(extra="ignore")
    elapsed_s: Seconds


class _Point(TrainingPoint):
    model_config = ConfigDict(extra="ignore")
    elapsed_s: Seconds


class _Revision(CodeRevision):
    model_config = ConfigDict(extra="ignore")
    elapsed_s: Seconds


@dataclass(frozen=True)
class RecordedLines(Generic[SeenT_co]):
    """The lines of one file.

    Attributes:
        present: whether the file exists, so that the recorder ran.
        every: one in `every` lines of a long file was kept, and the last.
        troubles: what could not be read, in words.
    """

    records: tuple[SeenT_co, ...] = ()
    present: bool = False
    every: int = 1
    troubles: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recorded:
    """All recorder files of one run."""

    trace: RecordedLines[TraceEvent] = RecordedLines()
    usage: RecordedLines[UsageLine] = RecordedLines()
    processes: RecordedLines[ProcessSeen] = RecordedLines()
    training: RecordedLines[TrainingPoint] = RecordedLines()
    revisions: RecordedLines[CodeRevision] = RecordedLines()

    @property
    def troubles(self) -> tuple[str, ...]:
        """Return what could not be read, of all files."""
        every: Sequence[RecordedLines[Any]] = (self.trace, self.usage, self.processes, self.training, self.revisions)
        return tuple(trouble for lines in every for trouble in lines.troubles)


def read_recorded(run: RunDir) -> Recorded:
    """Read what the recorder wrote about a run; all empty if nothing."""
    return Recorded(
        trace=read_lines(run.recorded("trace"), _Trace),
        usage=read_lines(run.recorded("usage"), UsageLine, thin=True),
        processes=read_lines(run.recorded("processes"), _Process),
        training=read_lines(run.recorded("training"), _Point, thin=True),
        revisions=read_lines(run.recorded("revisions"), _Revision),
    )


def read_lines(path: Path, model: type[SeenT_co], *, thin: bool = False) -> RecordedLines[SeenT_co]:
    """Read the lines of one file as records, in order.

    Args:
        thin: of more than MAX_LINES lines, keep only every second, fourth, ... and the last.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return RecordedLines()
    except OSError as error:
        why = "is a link" if error.errno == errno.ELOOP else f"can't be read: {error.strerror}"
        return RecordedLines(troubles=(f"{path.name} {why}",))
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        return RecordedLines(troubles=(f"{path.name} is no file",))
    with os.fdopen(descriptor, "rb") as file:
        reader = _Reader(path.name, model, _every(file.fileno(), status.st_size) if thin else 1)
        try:
            for block in _blocks(file, status.st_size):
                reader.take(block)
        except OSError as error:
            reader.troubles.append(f"{path.name} can't be read to its end: {error.strerror}")
    return reader.lines(status.st_size)


def _every(descriptor: int, size: int) -> int:
    """Return 1, 2, 4, ...: one in so many lines is kept. Estimated from the length of the first lines."""
    head = os.pread(descriptor, CHUNK_BYTES // 16, 0)
    lines = min(size, MAX_BYTES) * head.count(b"\n") / max(len(head), 1)
    every = 1
    while lines / every > MAX_LINES:
        every *= 2
    return every


def _blocks(file: Any, size: int) -> Iterator[list[bytes]]:
    """Yield whole lines in blocks of some MB; a last line without an end was cut. `size`: the file's size."""
    rest, total, step = b"", 0, min(CHUNK_BYTES, size + 1)
    while total < MAX_BYTES and (data := file.read(min(step, MAX_BYTES - total))):
        total += len(data)
        *lines, rest = (rest + data).split(b"\n")
        yield lines
        if len(rest) > CHUNK_BYTES:
            rest = b"x"  # an endless line: dropped, and counted as unreadable
    yield [rest]


class _Reader(Generic[SeenT_co]):
    """Collect the records of one file."""

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
        """Add the lines of one block."""
        kept = [line for line in block if line] if self.every == 1 else self._thinned(block)
        if not kept:
            return
        try:
            self.records += self._many.validate_json(b"[" + b",".join(kept) + b"]")
        except ValidationError:
            self._one_by_one(kept)

    def _thinned(self, block: list[bytes]) -> list[bytes]:
        kept = []
        for line in block:
            if line:
                self._number += 1
                is_kept = self._number % self.every == 1
                self._left = None if is_kept else line
                if is_kept:
                    kept.append(line)
        return kept

    def _one_by_one(self, lines: list[bytes]) -> None:
        for line in lines:
            if len(line) > MAX_LINE_BYTES:
                self._bad += 1
                continue
            try:
                self.records.append(self._one.validate_json(line))
            except ValidationError:
                self._bad += 1

    def lines(self, size: int) -> RecordedLines[SeenT_co]:
        """Return the collected records, including the last line."""
        if self._left is not None:
            self._one_by_one([self._left])
        if self._bad:
            words = "1 line" if self._bad == 1 else f"{self._bad} lines"
            self.troubles.append(f"{words} of {self.name} can't be read: cut, damaged or of a newer version")
        if size > MAX_BYTES:
            self.troubles.append(f"{self.name} has {size} bytes: only the first {MAX_BYTES} were read")
        if self.every > 1:
            self.troubles.append(f"{self.name} is long: of its lines every {self.every}th was read")
        return RecordedLines(tuple(self.records), True, self.every, tuple(self.troubles))


@cache
def _adapters(model: Any) -> tuple[TypeAdapter[Any], TypeAdapter[Any]]:
    """Return the adapters for one line and for a list of lines."""
    return TypeAdapter(model), TypeAdapter(list[model])


# --- agent.log by budget time, and events.jsonl: bounded reads

MAX_EXCERPT_BYTES = 8 * 1024
"""The end of what an agent wrote in one iteration, where a traceback would be."""

MAX_SCANNED_BYTES = 64 * 1024 * 1024
"""Part of a log that is searched for tracebacks; of a longer log half of this at each end. Takes a fraction of a second."""
SCAN_CHUNK_BYTES = 1024 * 1024
MAX_MARKS = 2_000
"""Of one kind in one log: the first half and the last half."""
MAX_TRACEBACKS = 20
"""Excerpts per stretch of time, the last ones."""
MAX_LEAD_BYTES = 200
"""Read before a mark: the beginning of its line, or its heading."""

TRACEBACK = b"Traceback (most recent call last)"
EXAMPLES = b"Num examples = "
_EXAMPLES = re.compile(rb"Num examples = ([\d,]{1,15})\b")

MAX_TIMES_BYTES = 8 * 1024 * 1024
MAX_EVENTS_BYTES = 4 * 1024 * 1024


def read_part(path: Path, offset: int, count: int) -> bytes:
    """Read up to `count` bytes from `offset`; empty if this fails. Links and pipes are not followed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, count, offset) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    except OSError:
        return b""
    finally:
        os.close(descriptor)


class AgentLog:
    """agent.log, and when each part of it was written."""

    def __init__(self, log: Path, times: Path) -> None:
        self._log = log
        self._bytes: list[int] = []
        self._elapsed: list[float] = []
        for line in read_part(times, 0, MAX_TIMES_BYTES).split(b"\n"):
            byte, _, rest = line.partition(b" ")
            try:
                at, elapsed_s = int(byte), float(rest.partition(b" ")[0])
            except ValueError:
                continue
            if not math.isfinite(elapsed_s):
                continue
            if not self._bytes or (at >= self._bytes[-1] and elapsed_s >= self._elapsed[-1]):
                self._bytes.append(at)
                self._elapsed.append(elapsed_s)

    @property
    def is_timed(self) -> bool:
        """Return whether the times of writing are recorded."""
        return bool(self._bytes)

    def size(self) -> int:
        """Return the size of the log in bytes; 0 if it does not exist."""
        try:
            return os.lstat(self._log).st_size
        except OSError:
            return 0

    def written_by(self, elapsed_s: float) -> int:
        """Return the offset up to which the log was certainly written at a time."""
        place = bisect_right(self._elapsed, elapsed_s)
        return self._bytes[place - 1] if place else 0

    def excerpts(self, begin_s: float, end_s: float) -> tuple[LogExcerpt, ...]:
        """Return tracebacks and end of what was written in a stretch of time; none if times are unknown."""
        return self._parts(self.written_by(begin_s), self.written_by(end_s)) if self.is_timed else ()

    def whole(self) -> tuple[LogExcerpt, ...]:
        """Return the log's tracebacks and its end."""
        return self._parts(0, self.size())

    def rows(self, begin_s: float, end_s: float) -> int | None:
        """Return the number of rows of the last training in a stretch of time, from the log lines of transformers' trainers."""
        begin, end = self.written_by(begin_s), self.written_by(end_s)
        for mark in reversed(self._examples[bisect_left(self._examples, begin) : bisect_left(self._examples, end)]):
            before = read_part(self._log, max(0, mark - MAX_LEAD_BYTES), min(mark, MAX_LEAD_BYTES))
            match = _EXAMPLES.match(read_part(self._log, mark, 40))
            said = before.rpartition(b"*****")[0].lower()
            if match is not None and not (b"evaluation" in said or b"prediction" in said):
                return int(match[1].replace(b",", b"") or 0)
        return None

    @cached_property
    def _tracebacks(self) -> list[int]:
        return _marks(self._log, self.size(), TRACEBACK)

    @cached_property
    def _examples(self) -> list[int]:
        return _marks(self._log, self.size(), EXAMPLES)

    def _parts(self, begin: int, end: int) -> tuple[LogExcerpt, ...]:
        last = self._cut(begin, end)
        until = last.offset if last is not None else end
        marks = self._tracebacks[bisect_left(self._tracebacks, begin) : bisect_left(self._tracebacks, until)]
        found = [self._around(mark, until) for mark in marks[-MAX_TRACEBACKS:]]
        return (*found, last) if last is not None else tuple(found)

    def _around(self, mark: int, until: int) -> LogExcerpt:
        """Return a traceback, from the start of its line if that is near, because a launcher's prefix is there."""
        lead = read_part(self._log, max(0, mark - MAX_LEAD_BYTES), min(mark, MAX_LEAD_BYTES))
        start = mark - len(lead) + lead.rfind(b"\n") + 1 if b"\n" in lead or mark <= MAX_LEAD_BYTES else mark
        data = read_part(self._log, start, min(MAX_EXCERPT_BYTES, until - start))
        after = data.find(TRACEBACK, mark - start + len(TRACEBACK))  # the next traceback is its own excerpt
        text = (data if after < 0 else data[:after]).decode("utf-8", "replace")
        return LogExcerpt("agent.log", start, text, only_tracebacks=True)

    def _cut(self, begin: int, end: int) -> LogExcerpt | None:
        start = max(begin, end - MAX_EXCERPT_BYTES)
        data = read_part(self._log, start, end - start) if end > start else b""
        if start > begin:  # starts in the middle of a line, perhaps of a character
            first = data.find(b"\n") + 1
            start, data = start + first, data[first:]
        return LogExcerpt("agent.log", start, data.decode("utf-8", "replace")) if data else None


def _marks(path: Path, size: int, mark: bytes) -> list[int]:
    """Return the offsets of `mark` in a log, in order."""
    half = MAX_SCANNED_BYTES // 2
    parts = [(0, size)] if size <= MAX_SCANNED_BYTES else [(0, half), (size - half, size)]
    found: list[int] = []
    for begin, end in parts:
        for at in range(begin, end, SCAN_CHUNK_BYTES):
            count = (
                min(SCAN_CHUNK_BYTES, end - at) + len(mark) - 1
            )  # so that a mark across two chunks is found in the first
            data = read_part(path, at, count)
            place = data.find(mark)
            while place >= 0:
                found.append(at + place)
                place = data.find(mark, place + 1)
            if len(found) > MAX_MARKS:
                del found[MAX_MARKS // 2 : -MAX_MARKS // 2]
    return found


def read_events(path: Path) -> Sequence[dict[str, Any]]:
    """Return the readable lines of events.jsonl; empty if there is no such file."""
    found = []
    for line in read_part(path, 0, MAX_EVENTS_BYTES).split(b"\n"):
        try:
            value = json.loads(line) if line else None
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and isinstance(value.get("event"), str):
            found.append(value)
    return found
