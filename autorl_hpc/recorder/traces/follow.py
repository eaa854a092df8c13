"""Follow an agent's trace in its output and in trajectory files, and write it to logs/trace.jsonl.

Events of the log have as offset the byte of their line, events of a document the message's number. So trace.jsonl itself says
where an earlier recorder stopped (`Resumed`), and nothing is counted twice.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from autorl_hpc.files.layout import RunDir
from autorl_hpc.files.redact import masked
from autorl_hpc.files.safe_open import open_plain
from autorl_hpc.recorder.traces import mini, openhands, parse
from autorl_hpc.recorder.traces.formats import FORMATS, OutputTimes, objects_in, read_document, read_line
from autorl_hpc.recorder.traces.parse import Event, counted, parsed, with_fields
from autorl_hpc.recorder.usage import Sweep
from autorl_hpc.recorder.watch import GrowingFile, LineWriter, Moment, Parts, open_files, whole_lines
from autorl_hpc.records.base import printable
from autorl_hpc.records.recorded import TraceEvent, TrajectoryMessage


@dataclass
class DocumentState:
    """What was already read of one document; `state` distinguishes one content of the file from the next."""

    session: str | None = None
    messages: int = 0
    totals: list[Event] = field(default_factory=list)
    state: tuple[int, ...] = ()


class Resumed:
    """What a trace.jsonl says: the line of the log at which to begin (`offset`), how many of its events are `written`, the time
    of the last event, and documents by source."""

    def __init__(self, trace: Path) -> None:
        self.offset = self.written = 0
        self.last_s = 0.0
        self.documents: dict[str, DocumentState] = {}
        for line in whole_lines(trace):
            try:
                self._add(TraceEvent.model_validate_json(line))
            except ValidationError:
                continue

    def _add(self, event: TraceEvent) -> None:
        self.last_s = max(self.last_s, event.elapsed_s)
        if event.source == LOG:
            same = event.offset == self.offset
            self.written = 0 if event.kind == "position" else self.written + 1 if same else 1
            self.offset = event.offset
            return
        followed = self.documents.setdefault(event.source, DocumentState())
        if event.kind == "session":
            followed.session, followed.messages = event.session, 0
        elif not event.is_total:
            followed.messages = max(followed.messages, event.offset + 1)


# --- trajectories: JSON documents in the workspace that a program rewrites after each step

# Two hundred steps make about 10 MB; parsing this much takes a second and at worst 600 MB.
MAX_DOCUMENT_BYTES = 24 * 2**20
MAX_DOCUMENTS = 64
MAX_DEPTH = 3
LEFT_OUT = frozenset(
    {"models", "data", "output", "results", "submissions", "environment", "node_modules", "__pycache__"}
)
# Hidden folders where programs store trajectories by default; in other hidden folders nothing is read.
_HIDDEN = ((".home", ".config", "mini-swe-agent"), (".home", ".openhands"), (".openhands",))
_NAMES = re.compile(r".{0,200}\.traj\.json|base_state\.json")


def is_trajectory(parts: Parts) -> bool:
    if not _NAMES.fullmatch(parts[-1]):
        return False
    start = next((len(hidden) for hidden in _HIDDEN if parts[: len(hidden)] == hidden), 0)
    folders = parts[start:-1]
    return len(folders) < MAX_DEPTH and not any(each.startswith(".") or each in LEFT_OUT for each in folders)


LOG = "agent.log"
Stamp = tuple[float, str]
LOOK_S = 0.3  # limit of one look. With the pause after it, this keeps up with plain output of 10 MB/s.
# Limit for reading on after the agent's end: 10 GB behind would take a minute, and the end of the run waits.
CLOSE_S = 20.0
SWEEP_S = 1.0
POSITION_EVERY_BYTES = 128 * 2**20  # at most this much is read again if the recorder restarts in output without a trace
# Limit of events that are held in memory if they can't be written; a full disk may have room again.
MAX_WAITING = 50_000


class Traces:
    """The watch over traces. `sweep` finds trajectories in its workspace; `only` is the format from the agent's definition; None
    tries every format on each line. Raises ValueError for an unknown format."""

    every_s = 2.0

    def __init__(
        self, run: RunDir, sweep: Sweep, only: str | None = None, look_s: float = LOOK_S, close_s: float = CLOSE_S
    ) -> None:
        if only is not None and only not in FORMATS:
            raise ValueError(f"no trace is in the format {only}; known are {', '.join(FORMATS)}")
        path = run.recorded("trace")
        before = Resumed(path)
        self._only, self._sweep, self._look_s, self._close_s = only, sweep, look_s, close_s
        self._lines, self._trajectories = LineWriter(path), LineWriter(run.recorded("trajectories"))
        self._path, self._log = run.agent_log, GrowingFile(before.offset)
        self._written = (before.offset, before.written)
        self._times = OutputTimes(run.agent_times)
        self._documents: dict[Parts, None] = {}
        self._states = before.documents
        self._looked_s = before.last_s
        self._noted = before.offset
        self._skipped = self._shrunk = 0
        self._waiting: list[TraceEvent] = []
        self._messages: list[TrajectoryMessage] = []
        if only in (None, mini.FORMAT, openhands.FORMAT):
            sweep.visitors.append(self.found)

    def found(self, parts: Parts, status: os.stat_result) -> None:
        """Take a file of the workspace from the walk. Called in the walk's thread."""
        if len(self._documents) < MAX_DOCUMENTS and stat.S_ISREG(status.st_mode) and is_trajectory(parts):
            self._documents[parts] = None

    def look(self, now: Moment) -> None:
        self._look(now, last=False)

    def close(self, now: Moment) -> None:
        try:
            deadline = time.monotonic() + self._close_s
            if self.found in self._sweep.visitors:
                self._sweep.show(self.found, time.monotonic() + SWEEP_S)
            while self._look(now, last=False) and time.monotonic() < deadline:
                pass
            self._look(now, last=True)
        finally:
            self._lines.close()
            self._trajectories.close()

    def _look(self, now: Moment, *, last: bool) -> bool:
        """Return whether the log had something new. A write may fail, so everything is read first."""
        before = self._log.offset
        try:
            self._read_log(now, last=last)
            self._read_documents(now)
            self._note(now, last=last)
        finally:
            self._lines.add(*self._waiting)
            self._waiting.clear()
            self._trajectories.add(*self._messages)
            self._messages.clear()
        self._looked_s = max(self._looked_s, now.elapsed_s)
        return self._log.offset > before

    def _read_log(self, now: Moment, *, last: bool) -> None:
        fd = open_plain(self._path)
        if fd is None:
            return
        try:
            size = os.fstat(fd).st_size
            if size < self._log.offset:  # what is left was read before: only what is written from now on is new
                self._log.offset, self._log.in_long_line = size, False
                self._shrunk += 1
            for offset, value in objects_in(self._log, fd, self._look_s, last=last):
                if (read := read_line(value, self._only)) is not None:
                    # Events of the first line may have been written by an earlier recorder.
                    events = counted(read[1])[self._written[1] if offset == self._written[0] else 0 :]
                    self._keep(now, LOG, read[0], offset, events, self._times.of(offset))
        finally:
            os.close(fd)

    def _read_documents(self, now: Moment) -> None:
        for parts, file in open_files(self._sweep.workspace, list(self._documents)) if self._documents else ():
            self._read_document(now, file, printable(masked("/".join(parts)))[:300])

    def _read_document(self, now: Moment, file: BinaryIO, source: str) -> None:
        status = os.fstat(file.fileno())
        followed = self._states.setdefault(source, DocumentState())
        state = (status.st_ino, status.st_size, status.st_mtime_ns)
        if state == followed.state or status.st_size > MAX_DOCUMENT_BYTES:
            return
        followed.state, data = state, file.read(MAX_DOCUMENT_BYTES)
        document = read_document(parsed(data.decode("utf-8", "replace")), self._only)
        if document is None:
            return  # half-written or in another format: read again when it changes
        messages = document.messages
        if followed.messages > len(messages) or document.session not in (None, followed.session):
            made_up = hashlib.sha256(data).hexdigest()[:16]
            followed.session, followed.messages, followed.totals = document.session or made_up, 0, []
            self._keep(now, source, document.format, 0, [{"kind": "session", "session": followed.session}])
        for number, message in enumerate(messages[followed.messages :], followed.messages):
            events = document.read(message) if isinstance(message, dict) else []
            self._keep(now, source, document.format, number, with_fields(counted(events), session=followed.session))
            self._messages.append(_kept(now, source, followed.session, message))
        followed.messages = len(messages)
        if document.totals != followed.totals:
            followed.totals = document.totals
            events = with_fields(counted(document.totals), session=followed.session)
            self._keep(now, source, document.format, max(0, followed.messages - 1), events)

    def _keep(
        self, now: Moment, source: str, form: str, offset: int, events: list[Event], stamp: Stamp | None = None
    ) -> None:
        """Store events. Their time is the output's stamp, or else their own, if between the last look and this one."""
        for fields in events:
            seen, clock = now.fields(), parse.wall(now.at)
            wall = fields.pop("wall", None)
            if stamp is not None and stamp[0] <= now.elapsed_s:
                seen = {**seen, "elapsed_s": stamp[0], "at": stamp[1]}
            elif wall is not None and clock is not None:
                seen = {**seen, "elapsed_s": now.within(wall - clock, self._looked_s)}
            if len(self._waiting) < MAX_WAITING:
                event = {**seen, "source": source, "format": form, "offset": offset, **fields}
                self._waiting.append(TraceEvent.model_validate(event))

    def _note(self, now: Moment, *, last: bool) -> None:
        skipped, unnoted = self._log.skipped - self._skipped, self._log.whole - self._noted
        if skipped or unnoted >= (1 if last else POSITION_EVERY_BYTES):
            self._skipped, self._noted = self._log.skipped, self._log.whole
            text = f"the log became shorter {self._shrunk} times" if self._shrunk else None
            fields = {"kind": "position", "skipped": skipped, "text": text}
            self._keep(now, LOG, self._only or "", self._noted, [fields])


MAX_MESSAGE_CHARS = 2**20  # A longer message of a trajectory is kept without its content


def _kept(now: Moment, source: str, session: str | None, message: object) -> TrajectoryMessage:
    """Return a message with secrets masked: in the JSON text, where names stand beside values, or else without its content."""
    text = json.dumps(message)
    value = parsed(masked(text)) if len(text) <= MAX_MESSAGE_CHARS else None
    if not isinstance(value, dict):
        value = {"role": parse.name(parse.within(message, "role")), "content": f"(not kept: {len(text)} characters)"}
    return TrajectoryMessage(**now.fields(), source=source, session=session, message=json.dumps(value))
