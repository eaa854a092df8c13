"""Read what the recorder wrote, agent.log by budget time, and events.jsonl; find log lines and tracebacks in excerpts.

Any file may be absent, damaged, half-written, of a newer version or huge. What can't be read is reported and left out.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from autorl_hpc.files.layout import RunDir
from autorl_hpc.files.safe_open import open_plain, read_times
from autorl_hpc.records.recorded import (
    CodeRevision,
    GpuSample,
    ObservedFact,
    ProcessSeen,
    Seen,
    TraceEvent,
    TrainingPoint,
    UsageSample,
)
from autorl_hpc.report.format import clean

# --- the recorder's files: fields of newer versions are ignored, and figures are bounded, because a damaged line would otherwise
# become the run's peak or dominate its sums

MAX_BYTES = 64 << 20  # the recorder's own limit per file
# Of a longer file of gauges or training steps every second, fourth, ... line is kept: one every 5 s for more than a day.
MAX_LINES = 20_000
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Count = Annotated[int, Field(ge=0, le=10**13)]
Bytes = Annotated[int, Field(ge=0, le=1 << 60)]
_LENIENT = ConfigDict(extra="ignore", allow_inf_nan=False)


class _Gpu(GpuSample):
    model_config = _LENIENT


class UsageLine(UsageSample):
    """A `UsageSample` with plausible figures."""

    model_config = _LENIENT
    elapsed_s: Seconds
    cpu_s: Annotated[float, Field(ge=0, le=1e13)] | None = None
    memory_bytes: Bytes | None = None
    disk_bytes: Bytes | None = None
    gpus: tuple[_Gpu, ...] | None = None


class _Trace(TraceEvent):
    model_config = _LENIENT
    elapsed_s: Seconds
    tokens_in: Count | None = None
    tokens_out: Count | None = None
    tokens_cached: Count | None = None
    cost_usd: Annotated[float, Field(ge=0, le=1e9)] | None = None
    calls: Count | None = None
    tool_calls: Count | None = None
    tool_failures: Count | None = None
    duration_s: Seconds | None = None


SeenT_co = TypeVar("SeenT_co", bound=Seen, covariant=True)


def _lenient(model: type[SeenT_co]) -> type[SeenT_co]:
    """Return a record that ignores fields of newer versions and has a plausible time."""
    own = {"model_config": _LENIENT, "__annotations__": {"elapsed_s": Seconds}, "__module__": __name__}
    return type(f"_{model.__name__}", (model,), own)


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
    observed: RecordedLines[ObservedFact] = RecordedLines()

    @property
    def troubles(self) -> tuple[str, ...]:
        return tuple(trouble for each in fields(self) for trouble in getattr(self, each.name).troubles)


def read_recorded(run: RunDir) -> Recorded:
    """Read what the recorder wrote about a run; all empty if nothing."""
    return Recorded(
        trace=read_lines(run.recorded("trace"), _Trace),
        usage=read_lines(run.recorded("usage"), UsageLine, max_lines=MAX_LINES),
        processes=read_lines(run.recorded("processes"), _lenient(ProcessSeen)),
        training=read_lines(run.recorded("training"), _lenient(TrainingPoint), max_lines=MAX_LINES),
        revisions=read_lines(run.recorded("revisions"), _lenient(CodeRevision)),
        observed=read_observed(run),
    )


def read_observed(run: RunDir) -> RecordedLines[ObservedFact]:
    return read_lines(run.recorded("observed"), _lenient(ObservedFact), max_lines=MAX_LINES)


def read_lines(
    path: Path, model: type[SeenT_co], *, max_lines: int | None = None, max_bytes: int = MAX_BYTES
) -> RecordedLines[SeenT_co]:
    """Read the lines of one file as records, in order; of more than `max_lines` only every second, fourth, ... and the last."""
    try:
        descriptor = open_plain(path)
        if descriptor is None:
            return RecordedLines(troubles=(f"{path.name} is not a regular file",) if os.path.lexists(path) else ())
        with os.fdopen(descriptor, "rb") as file:
            size, data = os.fstat(descriptor).st_size, file.read(max_bytes)
    except OSError as error:
        return RecordedLines(troubles=(f"{path.name} can't be read: {error.strerror}",))
    lines, every = [line for line in data.split(b"\n") if line], 1
    while max_lines is not None and len(lines) / every > max_lines:
        every *= 2
    records: list[SeenT_co] = []
    bad = 0
    for line in lines[::every] + ([lines[-1]] if lines and (len(lines) - 1) % every else []):
        try:
            records.append(model.model_validate_json(line))
        except ValidationError:
            bad += 1
    troubles = []
    if bad:
        words = "1 line" if bad == 1 else f"{bad} lines"
        troubles.append(f"{words} of {path.name} can't be read: cut, damaged or of a newer version")
    if size > max_bytes:
        troubles.append(f"{path.name} has {size} bytes: only the first {max_bytes} were read")
    if every > 1:
        troubles.append(f"{path.name} is long: of its lines every {every}th was read")
    return RecordedLines(tuple(records), True, every, tuple(troubles))


def read_part(path: Path, offset: int, count: int) -> bytes:
    """Read up to `count` bytes from `offset`; empty if this fails. Links and pipes are not followed."""
    try:
        descriptor = open_plain(path)
        if descriptor is None:
            return b""
        with os.fdopen(descriptor, "rb") as file:
            file.seek(offset)
            return file.read(count)
    except OSError:
        return b""


MAX_EVENTS_BYTES = 4 << 20


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


# --- agent.log by budget time

AGENT_LOG = "agent.log"
MAX_EXCERPT_BYTES = 8 * 1024  # the end of what an agent wrote in one iteration, where a traceback would be
# part of a log that is searched for tracebacks and trainings; of a longer log half of this at each end
MAX_SCANNED_BYTES = 64 << 20
MAX_TRACEBACKS = 20  # excerpts per stretch of time, the last ones
MAX_LEAD_BYTES = 200  # read before a traceback: the beginning of its line, where a launcher's prefix is
QUOTED_BYTES = 4_000  # shown around a place that evidence names
TRACEBACK = b"Traceback (most recent call last)"
# the heading and first line that trainers of transformers log
_ROWS = re.compile(rb"Running training[^\n]{0,200}\n[^\n]{0,200}Num examples = ([\d,]{1,15})\b")


class LogExcerpt(NamedTuple):
    """A part of a log, unchanged. `offset`: position of its first byte; `only_tracebacks`: it was cut out around one, and its
    other lines are not log lines."""

    source: str
    offset: int
    text: str
    only_tracebacks: bool = False


class AgentLog:
    """agent.log, and when each part of it was written."""

    def __init__(self, log: Path, times: Path, max_scanned: int = MAX_SCANNED_BYTES) -> None:
        self._log, self._times, self._max_scanned = log, read_times(times), max_scanned

    def size(self) -> int:
        try:
            return os.lstat(self._log).st_size
        except OSError:
            return 0

    def excerpts(self, begin_s: float, end_s: float) -> tuple[LogExcerpt, ...]:
        """Return tracebacks and end of what was written in a stretch of time; none if times are unknown."""
        return self._parts(self._times.written_by(begin_s), self._times.written_by(end_s))

    def whole(self) -> tuple[LogExcerpt, ...]:
        return self._parts(0, self.size())

    def quoted(self, byte: int | None, elapsed_s: float) -> str:
        """Return what stands around a byte; None: what was written from `elapsed_s` on."""
        begin = max(0, self._times.written_by(elapsed_s) if byte is None else byte - QUOTED_BYTES // 8)
        return read_part(self._log, begin, QUOTED_BYTES).decode("utf-8", "replace")

    def rows(self, begin_s: float, end_s: float) -> int | None:
        """Return the number of rows of the last training in a stretch of time, from the log lines of transformers' trainers."""
        begin, end = self._times.written_by(begin_s), self._times.written_by(end_s)
        return next((rows for at, rows in reversed(self._marks[1]) if begin <= at < end), None)

    @cached_property
    def _marks(self) -> tuple[list[int], list[tuple[int, int]]]:
        tracebacks: set[int] = set()
        trainings: set[tuple[int, int]] = set()
        half = self._max_scanned // 2
        for begin in {0, max(0, self.size() - half)}:
            data = read_part(self._log, begin, half + MAX_LEAD_BYTES)
            tracebacks |= {begin + m.start() for m in re.finditer(re.escape(TRACEBACK), data)}
            trainings |= {(begin + m.start(), int(m[1].replace(b",", b"") or 0)) for m in _ROWS.finditer(data)}
        return sorted(tracebacks), sorted(trainings)

    def _parts(self, begin: int, end: int) -> tuple[LogExcerpt, ...]:
        start = max(begin, end - MAX_EXCERPT_BYTES)
        data = read_part(self._log, start, end - start) if end > start else b""
        if start > begin:  # starts in the middle of a line, perhaps of a character
            first = data.find(b"\n") + 1
            start, data = start + first, data[first:]
        last = (LogExcerpt(AGENT_LOG, start, data.decode("utf-8", "replace")),) if data else ()
        until = start if data else end
        marks = self._marks[0][bisect_left(self._marks[0], begin) : bisect_left(self._marks[0], until)]
        return (*(self._around(mark, until) for mark in marks[-MAX_TRACEBACKS:]), *last)

    def _around(self, mark: int, until: int) -> LogExcerpt:
        lead = read_part(self._log, max(0, mark - MAX_LEAD_BYTES), min(mark, MAX_LEAD_BYTES))
        start = mark - len(lead) + lead.rfind(b"\n") + 1 if b"\n" in lead or mark <= MAX_LEAD_BYTES else mark
        data = read_part(self._log, start, min(MAX_EXCERPT_BYTES, until - start))
        after = data.find(TRACEBACK, mark - start + len(TRACEBACK))
        text = (data if after < 0 else data[:after]).decode("utf-8", "replace")
        return LogExcerpt(AGENT_LOG, start, text, only_tracebacks=True)


# --- lines and tracebacks of excerpts

MAX_LOG_CHARS = 400_000  # limit for all excerpts together; the ends are read, because tracebacks are there
MAX_LINE_CHARS = 2_000
MAX_TRACE_CHARS = 8_000  # length of a traceback inside a line of JSON
MAX_FRAME_LINES = 18  # the last frames of a traceback, each with source line and markers: the error is in these
PREFIX = r"(?:\[[\w: ]{1,20}\]:?\s)?"  # prefix that a launcher adds to each line: `[rank0]:`
_ERROR = re.compile(rf"^\s*{PREFIX}\s*([A-Za-z_][\w.]{{0,80}})(?::\s?(.{{0,300}})|\s*$)")
_FRAME = re.compile(rf'^{PREFIX}\s+File "([^"]{{0,500}})", line (\d+), in (.{{1,100}})')
_INDENTED = re.compile(rf"^{PREFIX}\s+\S")
# folders of installed packages and of Python: frames there show what a library did, not the agent's code
_INSTALLED = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages|\.?venv|(?:mini|ana)?conda\d?)/|/lib(?:64)?/python\d|^/usr/(?:local/)?lib|^<frozen"
)

_ROLLOUT_FRAME = re.compile(
    r"rollout|generat|vllm|(?:^|_)env|environment|episode|sampl(?!er)|reward|tool|playout|completion|parse(?!_?arg|_?conf|_?cli|_?opt|r)",
    re.I,
)
# A line of JSON from an agent's trace. What it quotes may be code, a file or a thought instead of a log.
_OF_TRACE = re.compile(r"^\s*(?:\{\s*\"|\"[\w.-]{1,40}\"\s*:)")
_ESCAPED = re.compile(r"Traceback \(most recent call last\):(\\+)n")


class LogLine(NamedTuple):
    """One line of a log, or the last line of a traceback. Not `is_log`: read for tracebacks only."""

    where: str
    text: str
    is_log: bool = True


def lines_of(logs: Sequence[LogExcerpt]) -> list[LogLine]:
    """Return the lines of log excerpts, each with its byte offset. A traceback inside a line of JSON gives several lines."""
    found: list[LogLine] = []
    left = MAX_LOG_CHARS
    for log in logs:
        text = log.text[-left:] if left else ""
        left -= len(text)
        offset = log.offset + len(log.text[: len(log.text) - len(text)].encode("utf-8", "replace"))
        source = clean(log.source, 150)
        for line in text.split("\n"):
            where = f"{source}, byte {offset}"
            escaped = _ESCAPED.search(line)
            if escaped is not None:
                quoted = line[escaped.start() : escaped.start() + MAX_TRACE_CHARS]
                found += [LogLine(where, each[:MAX_LINE_CHARS], False) for each in _unescaped(quoted, escaped[1])]
            else:
                is_log = not log.only_tracebacks and _OF_TRACE.match(line) is None
                found.append(LogLine(where, line[:MAX_LINE_CHARS], is_log))
            offset += len(line.encode("utf-8", "replace")) + 1
    return found


def _unescaped(text: str, slashes: str) -> Iterator[str]:
    """Yield the lines of a text inside a JSON string, or a nested one: `slashes` are the backslashes before each `n`."""
    for line in text.split(slashes + "n"):
        whole, end, _ = line.replace(slashes + '\\"', "\1").replace(slashes + '"', "\1").partition('"')
        yield whole.replace("\1", '"')
        if end:
            return


class Trace(NamedTuple):
    """One Python traceback: where it begins with its last line (class and message), whether a frame of the agent's own is in
    code for rollouts, environments, rewards or sampling, and the last frame of its own, as `train.py:12`."""

    error: LogLine
    in_rollout: bool
    frame: str | None = None


def tracebacks(lines: Sequence[LogLine]) -> list[Trace]:
    """Return complete tracebacks in order, and those of which a trace quotes the beginning."""
    found: list[Trace] = []
    begun: LogLine | None = None
    frames: list[str] = []
    for line in lines:
        if TRACEBACK.decode() in line.text:
            begun, frames = line, []
            continue
        if begun is None:
            continue
        error = None
        if _INDENTED.match(line.text) or not line.text.strip():
            frames.append(line.text)
        else:
            error = _ERROR.match(line.text)
        if error is not None:
            says = f"{error[1]}: {error[2] or ''}".strip(": ")
        elif not line.is_log and line.text.endswith("…"):
            says = f"a traceback, cut: {line.text.strip()}"
        else:
            continue
        own = [m for line in frames if (m := _FRAME.match(line)) is not None and not _INSTALLED.search(m[1])]
        frame = f"{own[-1][1].rsplit('/code/', 1)[-1].removeprefix('code/')}:{own[-1][2]}" if own else None
        last = (m for line in frames[-MAX_FRAME_LINES:] if (m := _FRAME.match(line)) and not _INSTALLED.search(m[1]))
        names = (name for m in last for name in (posixpath.basename(m[1]), m[3].strip().replace("<module>", "")))
        is_rollout = any(map(_ROLLOUT_FRAME.search, names))  # by function and file, not by folder
        found.append(Trace(LogLine(begun.where, says), is_rollout, frame))
        begun = None
    return found


_COMPLAINT = re.compile(
    r"error|exception|fail|fatal|denied|not found|no such|killed|abort|can.?t|cannot|unable|invalid", re.I
)


def crashes_in(observed: Iterable[ObservedFact]) -> list[Trace]:
    """Return the errors that ended the agent's Python programs, as the observer saw them."""
    found = []
    for fact in observed:
        told = [clean(str(fact.facts.get(key) or ""), 300) or "" for key in ("type", "message", "where")]
        kind, message, where = told
        if fact.what == "crashed" and kind not in ("", "KeyboardInterrupt", "SystemExit"):
            frame = where.rsplit("/code/", 1)[-1].removeprefix("code/") or None
            error = LogLine(frame or f"process at {fact.elapsed_s:.0f} s", f"{kind}: {message}".strip(": "))
            found.append(Trace(error, _ROLLOUT_FRAME.search(posixpath.basename(where)) is not None, frame))
    return found


def last_error(log: AgentLog, observed: Iterable[ObservedFact] = ()) -> LogLine | None:
    """Return the last line of the last traceback of an agent's log, else of the last crash that was observed, with the agent's own
    line of code if it is known; without both the log's last line if that speaks of an error."""
    lines = lines_of(log.whole())
    if traces := tracebacks(lines) or crashes_in(observed):
        return traces[-1].error._replace(where=traces[-1].frame or traces[-1].error.where)
    last = next((one for one in reversed(lines) if one.is_log and one.text.strip()), None)
    return last if last is not None and _COMPLAINT.search(last.text) else None
