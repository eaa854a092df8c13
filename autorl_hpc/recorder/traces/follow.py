"""Follow an agent's trace in its output and files, and write it to logs/trace.jsonl.

Holds `LogLines` (JSON in a growing log), the search for trajectory files, the detection of formats, `Documents`
(trajectories that are rewritten), `resumed` (where an earlier recorder stopped), `OutputTimes` and the watch `Traces`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from autorl_hpc.files.layout import RunDir
from autorl_hpc.files.redact import masked
from autorl_hpc.recorder.traces import claude_code, codex, gemini_cli, mini, opencode, openhands
from autorl_hpc.recorder.traces.parse import ParsedLine, Table, name, parsed
from autorl_hpc.recorder.watch import LineWriter, Moment
from autorl_hpc.records.base import printable
from autorl_hpc.records.recorded import TraceEvent

# --- a growing log: read its complete lines and parse those in JSON, among whatever else a program prints

MAX_LINE_BYTES = 4 * 1024 * 1024
"""A tool's result can hold a big output; parsing this much takes 50 ms and at worst 100 MB. Longer lines are only counted."""

MAX_BLOCK_BYTES = 4 * 1024 * 1024
"""Limit for one object printed over many lines."""

CHUNK_BYTES = 1024 * 1024
MAX_STARTS = 3
"""Number of braces in a line that are tried as the start of the object, because a prefix may contain braces too."""

_MARKS = (b'"type"', b'"kind"', b'"msg"', b'"action"', b'"observation"')
"""Every line of a trace contains one of these; other lines are not parsed."""

_ANSI = re.compile(rb"\x1b\[[0-?]{0,64}[ -/]{0,8}[@-~]")
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(frozen=True)
class Parsed:
    """An object found in the log."""

    offset: int
    value: Any


class LogLines:
    """Reads the log from `offset` on.

    Attributes:
        done: everything before this byte was read and is complete.
        ahead: position read so far; between `done` and `ahead` is an incomplete line or object.
        skipped: number of lines that were too long to read.
        blocks: whether objects over many lines are searched.
    """

    def __init__(self, path: Path, offset: int = 0, *, blocks: bool = True) -> None:
        self.path = path
        self.done = offset
        self.skipped = 0
        self.shrunk = 0
        self.blocks = blocks
        self.ahead = offset
        self._rest = bytearray()
        self._skipping = False
        self._block: bytearray | None = None
        self._block_at = 0

    def look(self, max_bytes: int, max_s: float) -> Iterator[Parsed]:
        """Yield what was added, within `max_bytes` and `max_s`; the next look reads the rest. Raises OSError."""
        try:
            fd = os.open(self.path, _OPEN_FLAGS)
        except FileNotFoundError:
            return
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return
            if status.st_size < self.ahead:
                self._begin_at(status.st_size)
            until, deadline = self.ahead + max_bytes, time.monotonic() + max_s
            while self.ahead < until:
                chunk = os.pread(fd, CHUNK_BYTES, self.ahead)
                if not chunk:
                    return
                yield from self._take(chunk, deadline)
                if time.monotonic() >= deadline:  # checked after reading, so that each look reads something
                    return
        finally:
            os.close(fd)

    def finish(self) -> Iterator[Parsed]:
        """Yield a last line without an end, because no more output comes."""
        if self._rest and not self._skipping:
            yield from self._line(bytes(self._rest), self.ahead - len(self._rest))
        self._begin_at(self.ahead, shrunk=False)

    def _begin_at(self, size: int, *, shrunk: bool = True) -> None:
        """Continue at `size`: if the log became shorter, what is left was read before, and only new bytes are read."""
        self.shrunk += shrunk
        self.done = self.ahead = size
        self._rest.clear()
        self._skipping = False
        self._block = None

    def _take(self, chunk: bytes, deadline: float) -> Iterator[Parsed]:
        at = self.ahead - len(self._rest)
        self.ahead += len(chunk)
        if b"\n" not in chunk:
            self._keep(chunk)
            return
        data = bytes(self._rest) + chunk
        self._rest.clear()
        begin, last = 0, data.rfind(b"\n") + 1
        if self._skipping:
            self._skipping = False
            self.skipped += 1
            begin = data.find(b"\n") + 1
        objects, blocks = _Ahead(data, b'{"'), _Ahead(data, b"{\n", b"{\r\n")
        while begin < last:
            if self._block is None:
                found = min(objects.after(begin), blocks.after(begin) if self.blocks else last, last)
                if found == last:
                    break
                begin = max(begin, data.rfind(b"\n", begin, found) + 1)
            end = data.index(b"\n", begin)
            if end - begin > MAX_LINE_BYTES:
                self.skipped += 1
            else:
                yield from self._line(data[begin:end], at + begin)
            begin = end + 1
            if self._block is None:
                self.done = at + begin
            if time.monotonic() > deadline:  # a chunk of small lines takes seconds
                self.ahead = at + begin
                return
        if self._block is None:
            self.done = at + last
        self._keep(data[last:])

    def _keep(self, data: bytes) -> None:
        """Store the beginning of an incomplete line."""
        if self._skipping:
            return
        self._rest += data
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest.clear()
            self._skipping = True

    def _line(self, line: bytes, at: int) -> Iterator[Parsed]:
        if self._block is not None:
            if not line.startswith(b"{"):  # inside an object printed over many lines, other lines are indented
                yield from self._in_block(line)
                return
            self._block = None
        if self.blocks and line.rstrip() == b"{":
            self._block, self._block_at = bytearray(b"{\n"), at
        elif any(mark in line for mark in _MARKS):
            value = object_in(line)
            if value is not None:
                yield Parsed(at, value)

    def _in_block(self, line: bytes) -> Iterator[Parsed]:
        assert self._block is not None
        self._block += line + b"\n"
        if line.rstrip() == b"}":
            value, self._block = parsed(self._block.decode("utf-8", "replace")), None
            if isinstance(value, dict):
                yield Parsed(self._block_at, value)
        elif len(self._block) > MAX_BLOCK_BYTES:
            self._block = None


class _Ahead:
    """Finds the next position of any of some patterns, and searches each part of the data once."""

    def __init__(self, data: bytes, *patterns: bytes) -> None:
        self.data = data
        self.found = dict.fromkeys(patterns, -1)

    def after(self, begin: int) -> int:
        """Return the first position at or after `begin`; the data's length if there is none."""
        for pattern in self.found:
            if self.found[pattern] < begin:
                at = self.data.find(pattern, begin)
                self.found[pattern] = len(self.data) if at < 0 else at
        return min(self.found.values())


def object_in(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line, after a prefix and before a suffix, without terminal colours; None if there is none."""
    if b"\x1b" in line:
        line = _ANSI.sub(b"", line)
    text = line.decode("utf-8", "replace")
    at = -1
    for _ in range(MAX_STARTS):
        at = text.find("{", at + 1)
        if at < 0:
            return None
        value = parsed(text, at)
        if isinstance(value, dict) and value:
            return value
    return None


# --- search for trajectories in a workspace. It belongs to the agent, so no link is followed and the search is limited.

MAX_ENTRIES = 5_000
MAX_DEPTH = 3
MAX_FOUND = 64
LEFT_OUT = frozenset(
    {"models", "data", "output", "results", "submissions", "environment", "node_modules", "__pycache__"}
)
"""Folders of the workspace and of programs that hold many files but no trajectories."""

_HOME = ".home"
_HIDDEN = ((_HOME, ".config", "mini-swe-agent"), (_HOME, ".openhands"), (".openhands",), (_HOME, "trajectories"))
"""Hidden folders where programs store trajectories by default; other hidden folders are not searched."""

_NAMES = re.compile(r".{0,200}\.traj\.json|base_state\.json|trajectory[^/]{0,100}\.json|.{0,200}\.trajectory\.json")
_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

Parts = tuple[str, ...]


def trajectories(workspace: Path) -> list[Parts]:
    """Return regular files named like trajectories, sorted: from the workspace to a depth of 3, then from the hidden folders."""
    found: set[Parts] = set()
    left = MAX_ENTRIES
    for start in ((), *_HIDDEN):
        left = _search(workspace, start, found, left)
    return sorted(found)[:MAX_FOUND]


def _search(workspace: Path, start: Parts, found: set[Parts], left: int) -> int:
    """Search below `start`. Return how many entries may still be read."""
    waiting: deque[Parts] = deque([start])
    while waiting and left > 0:
        parts = waiting.popleft()
        fd = opened(workspace, parts, _DIR_FLAGS)
        if fd is None:
            continue
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    left -= 1
                    if left <= 0:
                        break
                    here = (*parts, entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        hidden = entry.name.startswith(".") or entry.name in LEFT_OUT
                        if not hidden and len(here) - len(start) < MAX_DEPTH:
                            waiting.append(here)
                    elif entry.is_file(follow_symlinks=False) and _NAMES.fullmatch(entry.name):
                        found.add(here)
        except OSError:
            pass  # changed while it was read: the next search sees the rest
        finally:
            os.close(fd)
    return left


def opened(workspace: Path, parts: Parts, flags: int = _FILE_FLAGS) -> int | None:
    """Return a descriptor of a file or folder, opened part by part; None if it is missing, or a link is on the way."""
    try:
        fd = os.open(workspace, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    for number, part in enumerate(parts):
        try:
            following = os.open(part, flags if number == len(parts) - 1 else _DIR_FLAGS, dir_fd=fd)
        except OSError:
            return None
        finally:
            os.close(fd)
        fd = following
    return fd


def read_whole(
    workspace: Path, parts: Parts, known: tuple[int, ...] | None, max_bytes: int
) -> tuple[tuple[int, ...], bytes | None] | None:
    """Return what distinguishes one state of a file from the next, and its content; None as content if it is too large. Return
    None if the state equals `known`, or the file can't be read as a regular file."""
    fd = opened(workspace, parts)
    if fd is None:
        return None
    try:
        status = os.fstat(fd)
        state = (status.st_ino, status.st_size, status.st_mtime_ns)
        if not stat.S_ISREG(status.st_mode) or state == known:
            return None
        if status.st_size > max_bytes:
            return state, None
        data = bytearray()
        while len(data) <= max_bytes and (chunk := os.read(fd, 1024 * 1024)):
            data += chunk
        return (state, bytes(data)) if len(data) <= max_bytes else (state, None)
    except OSError:
        return None
    finally:
        os.close(fd)


# --- detection of a line's or document's format


class LineFormat(NamedTuple):
    """A format with one event per line."""

    name: str
    knows: Callable[[Table], bool]
    read: Callable[[Table], list[ParsedLine]]


LINE_FORMATS = tuple(
    LineFormat(each.FORMAT, each.knows, each.read)
    for each in (claude_code, opencode, gemini_cli, mini, codex, openhands)
)
"""In the order in which they are tried: formats that are recognised only by their own fields come first."""

FORMATS = tuple(each.name for each in LINE_FORMATS)


def read_line(value: Any, only: str | None = None) -> tuple[str, list[ParsedLine]] | None:
    """Return the format and content of a line parsed as JSON; None if it is in no format, or not in the one wanted."""
    if not isinstance(value, dict):
        return None
    for each in LINE_FORMATS:
        if only in (None, each.name) and each.knows(value):
            return each.name, each.read(value)
    return None


class TraceDocument(NamedTuple):
    """A document's messages in order, and its totals."""

    format: str
    session: str | None
    messages: list[Any]
    read: Callable[[Table], list[ParsedLine]]
    totals: list[ParsedLine]


def read_document(value: Any, only: str | None = None) -> TraceDocument | None:
    """Parse a trajectory or a state file; None if it is neither."""
    if only in (None, mini.FORMAT) and mini.is_document(value):
        return TraceDocument(
            mini.FORMAT, mini.session(value), value["messages"], mini.read_message, mini.read_totals(value)
        )
    if only not in (None, openhands.FORMAT):
        return None
    if openhands.is_state(value):
        return TraceDocument(openhands.FORMAT, None, [], openhands.read, openhands.read_state(value))
    if isinstance(value, list) and any(isinstance(each, dict) and openhands.knows(each) for each in value[:50]):
        first = next((each.get("timestamp") for each in value if isinstance(each, dict)), None)
        return TraceDocument(openhands.FORMAT, name(first), value, openhands.read, [])
    return None


# --- trajectories: JSON documents that a program rewrites after each step; read again when they changed

MAX_DOCUMENT_BYTES = 24 * 1024 * 1024
"""Two hundred steps make about 10 MB; parsing this much takes a second and at worst 600 MB."""

SEARCH_EVERY_S = 10.0
SEARCH_SHARE = 0.0005
LATEST_SEARCH_S = 120.0
"""SEARCH_SHARE is a share of a core: a search of 20 ms, among thousands of files, is repeated after 40 s."""

COST_FACTOR = 50
"""A document that took a second to read is read again after 50 s, so that reading takes at most 2 % of a core."""


class DocumentEvent(NamedTuple):
    """One event found in a document."""

    source: str
    format: str
    offset: int
    told: ParsedLine


@dataclass
class DocumentState:
    """What was already read of one document."""

    session: str | None = None
    messages: int = 0
    totals: tuple[ParsedLine, ...] = ()
    state: tuple[int, ...] | None = None
    not_before: float = 0.0
    too_large: bool = field(default=False)


class Documents:
    """All trajectories of a workspace.

    Args:
        only: the agent's format; if it has no documents, none are searched.
        known: by source, what an earlier recorder has written.
    """

    def __init__(self, workspace: Path, only: str | None, known: dict[str, DocumentState]) -> None:
        self.workspace = workspace
        self.only = only
        self.known = known
        self.wanted = only in (None, mini.FORMAT, openhands.FORMAT)
        self._places: list[Parts] = []
        self._next_search = 0.0

    def look(self, *, last: bool = False) -> Iterator[DocumentEvent]:
        """Yield what was added. With `last`, nothing is deferred."""
        if not self.wanted:
            return
        if last or time.monotonic() >= self._next_search:
            self._search()
        for parts in self._places:
            source = source_of(parts)
            followed = self.known.setdefault(source, DocumentState())
            if last or time.monotonic() >= followed.not_before:
                yield from self._read(parts, source, followed)

    def _search(self) -> None:
        used = time.thread_time()
        self._places = trajectories(self.workspace)
        pause_s = (time.thread_time() - used) / SEARCH_SHARE
        self._next_search = time.monotonic() + min(LATEST_SEARCH_S, max(SEARCH_EVERY_S, pause_s))

    def _read(self, parts: Parts, source: str, followed: DocumentState) -> Iterator[DocumentEvent]:
        began = time.monotonic()
        read = read_whole(self.workspace, parts, followed.state, MAX_DOCUMENT_BYTES)
        if read is None:
            return
        state, data = read
        followed.too_large = data is None
        value = parsed(data.decode("utf-8", "replace")) if data is not None else None
        document = read_document(value, self.only)
        ended = time.monotonic()
        followed.not_before = ended + COST_FACTOR * (ended - began)
        followed.state = state
        if document is None:
            return  # half-written or in another format: read again when it changes
        if (document.session is not None and document.session != followed.session) or followed.messages > len(
            document.messages
        ):
            followed.session, followed.messages, followed.totals = document.session or _made_up(data), 0, ()
            yield DocumentEvent(source, document.format, 0, ParsedLine("session", session=followed.session))
        for number, message in enumerate(document.messages[followed.messages :], followed.messages):
            for told in document.read(message) if isinstance(message, dict) else ():
                yield DocumentEvent(source, document.format, number, _of(told, followed.session))
        followed.messages = len(document.messages)
        totals = tuple(document.totals)
        if totals != followed.totals:
            followed.totals = totals
            for told in totals:
                yield DocumentEvent(source, document.format, max(0, followed.messages - 1), _of(told, followed.session))


def source_of(parts: Parts) -> str:
    """Return a file's name in records: relative to the workspace, escaped."""
    return printable(masked("/".join(parts)))[:300]


def _of(told: ParsedLine, session: str | None) -> ParsedLine:
    return told if told.session is not None or session is None else replace(told, session=session)


def _made_up(data: bytes | None) -> str | None:
    return name(hashlib.sha256(data or b"").hexdigest()[:16])


# --- resume: what an earlier recorder has written, so that nothing is counted twice


@dataclass
class Resumed:
    """Where to continue.

    Attributes:
        offset: of the log, the line at which to begin.
        told: number of events of that line that are already written.
        last_s: budget used at the last event.
        documents: by source.
    """

    offset: int = 0
    told: int = 0
    last_s: float = 0.0
    documents: dict[str, DocumentState] = field(default_factory=dict)


def resumed(trace: Path, log_source: str) -> Resumed:
    """Read a trace.jsonl. A cut last line is removed, because the next record would be appended to it."""
    found = Resumed()
    try:
        with open(trace, "r+b") as file:
            whole = 0
            for line in file:
                if not line.endswith(b"\n"):
                    os.ftruncate(file.fileno(), whole)
                    break
                whole += len(line)
                _add(found, line, log_source)
    except FileNotFoundError:
        pass
    return found


def _add(found: Resumed, line: bytes, log_source: str) -> None:
    try:
        event = json.loads(line)
        source, kind, offset = event["source"], event["kind"], int(event["offset"])
        found.last_s = max(found.last_s, float(event["elapsed_s"]))
    except (ValueError, KeyError, TypeError):
        return
    if source == log_source:
        if kind == "position":
            found.offset, found.told = offset, 0
        elif offset == found.offset:
            found.told += 1
        else:
            found.offset, found.told = offset, 1
        return
    followed = found.documents.setdefault(source, DocumentState())
    if kind == "session":
        followed.session, followed.messages = event.get("session"), 0
    elif not event.get("is_total"):
        followed.messages = max(followed.messages, offset + 1)


# --- times: when a byte of agent.log was written, from agent.times

TIMES_CHUNK_BYTES = 256 * 1024


class OutputTimes:
    """Answers for increasing offsets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        self._rest = b""
        self._stamps: list[tuple[int, float, str]] = []
        self._next = 0
        self._ended = False

    def look_again(self) -> None:
        """Read again at the next call, because stamps may have been added."""
        self._ended = False

    def of(self, offset: int) -> tuple[float, str] | None:
        """Return (elapsed_s, wall clock) at which the byte at `offset` was written; None if no stamp covers it yet."""
        while True:
            while self._next < len(self._stamps):
                upto, elapsed_s, at = self._stamps[self._next]
                if upto > offset:
                    return elapsed_s, at
                self._next += 1
            if self._ended or not self._more():
                self._ended = True
                return None

    def _more(self) -> bool:
        """Read further stamps. Return False if nothing was added."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                data = os.pread(fd, TIMES_CHUNK_BYTES, self._at)
            finally:
                os.close(fd)
        except OSError:
            return False
        if not data:
            return False
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._stamps, self._next = [stamp for line in lines if (stamp := _stamp(line)) is not None], 0
        return True


def _stamp(line: bytes) -> tuple[int, float, str] | None:
    try:
        upto, elapsed_s, at = line.decode("ascii").split()
        return int(upto), max(0.0, float(elapsed_s)), at
    except ValueError:
        return None


LOG = "agent.log"
LOOK_BYTES = 64 * 1024 * 1024
LOOK_S = 0.3
"""Limit of one look, because other watches wait. With the pause after it, this keeps up with plain output of 10 MB/s."""

CLOSE_S = 20.0
"""Limit for reading on after the agent's end: 10 GB behind would take a minute, and the end of the run waits."""

POSITION_EVERY_BYTES = 128 * 1024 * 1024
"""At most this much is read again if the recorder restarts in output without a trace."""

MAX_WAITING = 50_000
"""Limit of events that are held in memory if they can't be written; a full disk may have room again."""


class Traces:
    """The watch over traces.

    Args:
        trace_format: from the agent's definition; None tries every format on each line.

    Raises:
        ValueError: unknown format.
    """

    name = "traces"
    every_s = 2.0

    def __init__(self, run: RunDir, workspace: Path, agent_log: Path, trace_format: str | None = None) -> None:
        if trace_format is not None and trace_format not in FORMATS:
            raise ValueError(f"no trace is in the format {trace_format}; known are {', '.join(FORMATS)}")
        path = run.recorded("trace")
        before = resumed(path, LOG)
        self._only = trace_format
        self._lines = LineWriter(path)
        self._log = LogLines(agent_log, before.offset)
        self._drop = (before.offset, before.told)
        self._documents = Documents(workspace, trace_format, before.documents)
        self._times = OutputTimes(run.agent_times)
        self._looked_s = before.last_s
        self._noted = before.offset
        self._skipped = 0
        self._waiting: list[TraceEvent] = []

    @property
    def full(self) -> bool:
        """Return whether the record reached its limit, so that its figures are too low."""
        return self._lines.full

    def look(self, now: Moment) -> None:
        """Read what was added, within limits."""
        self._look(now, LOOK_BYTES, LOOK_S, last=False)

    def close(self, now: Moment) -> None:
        """Read to the end, for CLOSE_S at most."""
        try:
            deadline = time.monotonic() + CLOSE_S
            while self._look(now, LOOK_BYTES, LOOK_S, last=False) and time.monotonic() < deadline:
                pass
            self._look(now, LOOK_BYTES, LOOK_S, last=True)
        finally:
            self._lines.close()

    def _look(self, now: Moment, max_bytes: int, max_s: float, *, last: bool) -> bool:
        """Look once. Return whether the log had something new. A write may fail, so everything is read first."""
        wall, before = _wall(now.at), self._log.ahead
        self._times.look_again()
        try:
            for line in chain(self._log.look(max_bytes, max_s), self._log.finish() if last else ()):
                read = read_line(line.value, self._only)
                if read is None:
                    continue
                at = self._times.of(line.offset)
                for told in self._unwritten(line.offset, read[1]):
                    self._keep(self._event(now, wall, DocumentEvent(LOG, read[0], line.offset, told), at))
            for found in self._documents.look(last=last):
                self._keep(self._event(now, wall, found, None))
            self._note(now, last=last)
        finally:
            self._flush()
        self._looked_s = max(self._looked_s, now.elapsed_s)
        return self._log.ahead > before

    def _unwritten(self, offset: int, told: list[ParsedLine]) -> Iterable[ParsedLine]:
        """Skip the events of the first line that an earlier recorder has written."""
        return told[self._drop[1] :] if offset == self._drop[0] else told

    def _event(
        self, now: Moment, wall: float | None, found: DocumentEvent, stamp: tuple[float, str] | None
    ) -> TraceEvent:
        """Build the record. Its time is the output's stamp, or else the event's own, if between the last look and this one."""
        elapsed_s, at = now.elapsed_s, now.at
        if stamp is not None and stamp[0] <= elapsed_s:
            elapsed_s, at = stamp
        elif found.told.wall is not None and wall is not None:
            elapsed_s = min(max(elapsed_s - (wall - found.told.wall), min(self._looked_s, elapsed_s)), elapsed_s)
        # Null fields are left out, because most of the twenty fields of most events are null.
        values = {name: value for name, value in vars(found.told).items() if value is not None and name != "wall"}
        return TraceEvent(
            elapsed_s=elapsed_s,
            at=at,
            attempt=now.attempt,
            source=found.source,
            offset=found.offset,
            format=found.format,
            **values,
        )

    def _keep(self, event: TraceEvent) -> None:
        """Store an event. Parts of one message, which some programs print as they come, are joined."""
        last = self._waiting[-1] if self._waiting else None
        if (
            last is not None
            and last.kind == event.kind == "message"
            and last.offset != event.offset
            and (last.source, last.session, last.elapsed_s) == (event.source, event.session, event.elapsed_s)
        ):
            chars = (last.chars or 0) + (event.chars or 0)
            self._waiting[-1] = event.model_copy(update={"chars": chars})  # with the later line's offset
        elif len(self._waiting) < MAX_WAITING:
            self._waiting.append(event)

    def _note(self, now: Moment, *, last: bool) -> None:
        """Record how far the log was read if no event shows it, and how many lines were too long."""
        skipped, unnoted = self._log.skipped - self._skipped, self._log.done - self._noted
        if not skipped and unnoted < (1 if last else POSITION_EVERY_BYTES):
            return
        self._skipped, self._noted = self._log.skipped, self._log.done
        text = f"the log became shorter {self._log.shrunk} times" if self._log.shrunk else None
        told = {"offset": self._log.done, "format": self._only or "", "skipped": skipped, "text": text}
        self._keep(TraceEvent.model_validate({**now.told(), "kind": "position", "source": LOG, **told}))

    def _flush(self) -> None:
        self._lines.add(*self._waiting)
        self._waiting = []


def _wall(at: str) -> float | None:
    try:
        return datetime.fromisoformat(at).timestamp()
    except ValueError:
        return None
