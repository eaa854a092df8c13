"""Follows what an agent's program tells of itself, in its output and in files, and writes it to logs/trace.jsonl."""

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

# Follows a log that grows: its complete lines, those in JSON parsed, between whatever else a program prints.

MAX_LINE_BYTES = 4 * 1024 * 1024
"""A tool's result can hold a big output; to parse this much takes some 50 ms and, at worst, 100 MB. Longer lines are counted."""

MAX_BLOCK_BYTES = 4 * 1024 * 1024
"""Of one object printed over many lines."""

CHUNK_BYTES = 1024 * 1024
MAX_STARTS = 3
"""A prefix may hold braces too: so many of them are tried as the beginning of the object."""

_MARKS = (b'"type"', b'"kind"', b'"msg"', b'"action"', b'"observation"')
"""What every line of a trace has: others are not parsed."""

_ANSI = re.compile(rb"\x1b\[[0-?]{0,64}[ -/]{0,8}[@-~]")
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(frozen=True)
class Parsed:
    """An object that stood in the log."""

    offset: int
    value: Any


class LogLines:
    """The log from `offset` on.

    Attributes:
        done: everything before this byte was read and need not be read again.
        ahead: so far it was read; between the two stands the beginning of a line or an object.
        skipped: lines too long to be read, so far.
        blocks: whether objects over many lines are looked for.
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
        """What was added, as far as bytes and time allow; the rest waits for the next look. Raises OSError."""
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
                if time.monotonic() >= deadline:  # not before: a look that takes nothing is one that found nothing
                    return
        finally:
            os.close(fd)

    def finish(self) -> Iterator[Parsed]:
        """Nothing comes any more: what stands behind the last line's end is a line too."""
        if self._rest and not self._skipping:
            yield from self._line(bytes(self._rest), self.ahead - len(self._rest))
        self._begin_at(self.ahead, shrunk=False)

    def _begin_at(self, size: int, *, shrunk: bool = True) -> None:
        """If the log became shorter, what is left of it was read before: only what comes now is new."""
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
        """The beginning of a line whose end has not come."""
        if self._skipping:
            return
        self._rest += data
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest.clear()
            self._skipping = True

    def _line(self, line: bytes, at: int) -> Iterator[Parsed]:
        if self._block is not None:
            if not line.startswith(b"{"):  # within an object printed over many lines, everything else is indented
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
    """Where the next of some patterns stands; what was found once is not looked for again."""

    def __init__(self, data: bytes, *patterns: bytes) -> None:
        self.data = data
        self.found = dict.fromkeys(patterns, -1)

    def after(self, begin: int) -> int:
        """The first place at or after `begin`; the data's length if there is none."""
        for pattern in self.found:
            if self.found[pattern] < begin:
                at = self.data.find(pattern, begin)
                self.found[pattern] = len(self.data) if at < 0 else at
        return min(self.found.values())


def object_in(line: bytes) -> dict[str, Any] | None:
    """The JSON object in a line, behind a prefix and before a suffix, terminal colours left out."""
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


# Where programs leave trajectories in a workspace. It belongs to the agent: no link is followed, the search is bounded.

MAX_ENTRIES = 5_000
MAX_DEPTH = 3
MAX_FOUND = 64
LEFT_OUT = frozenset(
    {"models", "data", "output", "results", "submissions", "environment", "node_modules", "__pycache__"}
)
"""Folders of the workspace, and of programs, in which no trajectory lies but much else."""

_HOME = ".home"
_HIDDEN = ((_HOME, ".config", "mini-swe-agent"), (_HOME, ".openhands"), (".openhands",), (_HOME, "trajectories"))
"""Hidden folders in which programs keep them by default; others that begin with a dot are not looked into."""

_NAMES = re.compile(r".{0,200}\.traj\.json|base_state\.json|trajectory[^/]{0,100}\.json|.{0,200}\.trajectory\.json")
_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

Parts = tuple[str, ...]


def trajectories(workspace: Path) -> list[Parts]:
    """Regular files that are called like trajectories, sorted; the workspace first to a depth of 3, then the known places."""
    found: set[Parts] = set()
    left = MAX_ENTRIES
    for start in ((), *_HIDDEN):
        left = _search(workspace, start, found, left)
    return sorted(found)[:MAX_FOUND]


def _search(workspace: Path, start: Parts, found: set[Parts], left: int) -> int:
    """Adds what lies below `start`; returns how many entries may still be looked at."""
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
            pass  # it changes under our eyes: the next search sees the rest
        finally:
            os.close(fd)
    return left


def opened(workspace: Path, parts: Parts, flags: int = _FILE_FLAGS) -> int | None:
    """A descriptor of a file or folder, opened part by part; None if it is not there, or a link is on the way."""
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
    """What tells one state of a file from the next, and its content; no content if it is too large.

    None if it is as `known`, or can't be read as a regular file.
    """
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


# Which format a line or a document is in.


class LineFormat(NamedTuple):
    """One that tells by lines."""

    name: str
    knows: Callable[[Table], bool]
    read: Callable[[Table], list[ParsedLine]]


LINE_FORMATS = tuple(
    LineFormat(each.FORMAT, each.knows, each.read)
    for each in (claude_code, opencode, gemini_cli, mini, codex, openhands)
)
"""In the order in which a line is tried: those that only their own fields show come first."""

FORMATS = tuple(each.name for each in LINE_FORMATS)


def read_line(value: Any, only: str | None = None) -> tuple[str, list[ParsedLine]] | None:
    """Format and content of a line that was parsed as JSON; None if no format, or not the one wanted, knows it."""
    if not isinstance(value, dict):
        return None
    for each in LINE_FORMATS:
        if only in (None, each.name) and each.knows(value):
            return each.name, each.read(value)
    return None


class TraceDocument(NamedTuple):
    """A document's messages in order, and what it says of the whole."""

    format: str
    session: str | None
    messages: list[Any]
    read: Callable[[Table], list[ParsedLine]]
    totals: list[ParsedLine]


def read_document(value: Any, only: str | None = None) -> TraceDocument | None:
    """A trajectory, or a state file."""
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


# Follows trajectories: JSON documents that a program writes anew after each step, read again when they changed.

MAX_DOCUMENT_BYTES = 24 * 1024 * 1024
"""Two hundred steps make some 10 MB; to parse this much takes a second and, at worst, 600 MB."""

SEARCH_EVERY_S = 10.0
SEARCH_SHARE = 0.0005
LATEST_SEARCH_S = 120.0
"""A search that took 20 ms, among thousands of files, comes again after 40 s; it is a share of a core."""

COST_FACTOR = 50
"""A document that took a second to read is read again after 50: its growth must not cost more than 2 % of a core."""


class DocumentEvent(NamedTuple):
    """One thing that a document tells."""

    source: str
    format: str
    offset: int
    told: ParsedLine


@dataclass
class DocumentState:
    """What is known of one document: messages that were told, of which session."""

    session: str | None = None
    messages: int = 0
    totals: tuple[ParsedLine, ...] = ()
    state: tuple[int, ...] | None = None
    not_before: float = 0.0
    too_large: bool = field(default=False)


class Documents:
    """All trajectories of a workspace.

    Args:
        only: the agent's format; one that writes no documents means that none are looked for.
        known: by source, what a recorder before this one has told.
    """

    def __init__(self, workspace: Path, only: str | None, known: dict[str, DocumentState]) -> None:
        self.workspace = workspace
        self.only = only
        self.known = known
        self.wanted = only in (None, mini.FORMAT, openhands.FORMAT)
        self._places: list[Parts] = []
        self._next_search = 0.0

    def look(self, *, last: bool = False) -> Iterator[DocumentEvent]:
        """What was added. `last`: nothing is put off."""
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
            return  # half-written, or none of ours: it is read again when it has changed
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
    """How a file is named in records: relative to the workspace, escaped."""
    return printable(masked("/".join(parts)))[:300]


def _of(told: ParsedLine, session: str | None) -> ParsedLine:
    return told if told.session is not None or session is None else replace(told, session=session)


def _made_up(data: bytes | None) -> str | None:
    return name(hashlib.sha256(data or b"").hexdigest()[:16])


# What a recorder before this one has written: where to go on, so that nothing is counted twice.


@dataclass
class Resumed:
    """Where to go on.

    Attributes:
        offset: of the log, the line at which to begin.
        told: so many events of that line are written already.
        last_s: budget used at the last event.
        documents: by source.
    """

    offset: int = 0
    told: int = 0
    last_s: float = 0.0
    documents: dict[str, DocumentState] = field(default_factory=dict)


def resumed(trace: Path, log_source: str) -> Resumed:
    """Reads a trace.jsonl; a cut last line is taken away, or the next record would be written behind it."""
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


# When a byte of agent.log was written, from agent.times: for a reader that comes later.

TIMES_CHUNK_BYTES = 256 * 1024


class OutputTimes:
    """Answers for offsets that only grow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        self._rest = b""
        self._stamps: list[tuple[int, float, str]] = []
        self._next = 0
        self._ended = False

    def look_again(self) -> None:
        """Stamps may have been added."""
        self._ended = False

    def of(self, offset: int) -> tuple[float, str] | None:
        """elapsed_s and wall clock by which the byte at `offset` was there; None if no stamp tells yet."""
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
        """Reads on; False if nothing was added."""
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
"""Of one look: other watches wait. With the pause after it, plain output of 10 MB/s is kept up with."""

CLOSE_S = 20.0
"""After the agent's end, so long is read on; 10 GB behind would take a minute, and the run's end waits."""

POSITION_EVERY_BYTES = 128 * 1024 * 1024
"""So much is read again at most when the recorder starts anew in output that holds no trace."""

MAX_WAITING = 50_000
"""Events that could not be written are kept, so many of them: a full disk may have room again."""


class Traces:
    """The watch over traces.

    Args:
        trace_format: what the agent's definition says; None: every line is tried in each format.

    Raises:
        ValueError: no such format.
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
        """Whether there was more than the record may hold: its figures are too low."""
        return self._lines.full

    def look(self, now: Moment) -> None:
        """Reads what was added, within bounds."""
        self._look(now, LOOK_BYTES, LOOK_S, last=False)

    def close(self, now: Moment) -> None:
        """Reads to the end, for 20 s at most."""
        try:
            deadline = time.monotonic() + CLOSE_S
            while self._look(now, LOOK_BYTES, LOOK_S, last=False) and time.monotonic() < deadline:
                pass
            self._look(now, LOOK_BYTES, LOOK_S, last=True)
        finally:
            self._lines.close()

    def _look(self, now: Moment, max_bytes: int, max_s: float, *, last: bool) -> bool:
        """Looks once; whether the log had something new. Nothing is written before all is taken in: a write may fail."""
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
        """A recorder before this one may have written the first events of the line at which this one begins."""
        return told[self._drop[1] :] if offset == self._drop[0] else told

    def _event(
        self, now: Moment, wall: float | None, found: DocumentEvent, stamp: tuple[float, str] | None
    ) -> TraceEvent:
        """When it was: by the stamp of the output, else by its own time, which can lie between this look and the last."""
        elapsed_s, at = now.elapsed_s, now.at
        if stamp is not None and stamp[0] <= elapsed_s:
            elapsed_s, at = stamp
        elif found.told.wall is not None and wall is not None:
            elapsed_s = min(max(elapsed_s - (wall - found.told.wall), min(self._looked_s, elapsed_s)), elapsed_s)
        # What is null in a line of ours is null where it is left out, too: most of the twenty fields of most events.
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
        """Parts of one message, which some programs print as it comes, are put together."""
        last = self._waiting[-1] if self._waiting else None
        if (
            last is not None
            and last.kind == event.kind == "message"
            and last.offset != event.offset
            and (last.source, last.session, last.elapsed_s) == (event.source, event.session, event.elapsed_s)
        ):
            chars = (last.chars or 0) + (event.chars or 0)
            self._waiting[-1] = event.model_copy(update={"chars": chars})  # at the later line: it is told up to there
        elif len(self._waiting) < MAX_WAITING:
            self._waiting.append(event)

    def _note(self, now: Moment, *, last: bool) -> None:
        """How far the log was read, where no event says it, and what was too long to be read."""
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
