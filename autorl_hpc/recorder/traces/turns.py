"""Read an agent's trace as turns with their full content: one form for all formats, from agent.log and kept trajectories.

A turn is one answer of the driver with the results of the tools that it called. Output that is in no format is kept as blocks
of text between turns. Texts are bounded, secrets masked, terminal escapes removed; they are still an agent's words.
"""

from __future__ import annotations

import heapq
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autorl_hpc.files.redact import masked
from autorl_hpc.files.safe_open import open_plain, without_escapes
from autorl_hpc.recorder.traces import mini, parse
from autorl_hpc.recorder.traces.formats import OutputTimes, objects_in, read_line
from autorl_hpc.recorder.traces.parse import Event
from autorl_hpc.recorder.watch import GrowingFile
from autorl_hpc.records.recorded import TraceEvent, TrajectoryMessage

LOG = "agent.log"
BLOCK_BYTES = 8 * 1024  # plain output is cut into blocks of about this size
MAX_BLOCKS = 128  # of plain output between two lines of a trace; half of them at each end
HEAD_CHARS, TAIL_CHARS = 48 * 1024, 16 * 1024  # kept of a longer text
MASK_AHEAD_CHARS = 4096  # secrets are masked in this much more of a text before it is cut
MAX_TURN_CHARS = 2**19  # A longer turn goes on in another entry, so that no page of it is large
MAX_CHARS = 192 * 2**20  # of a whole trace
# For finding the lines of a trace in a log: 100 MB take 5 s, and gigabytes of other output could take hours.
READ_S = 300.0
# Formats that mark the beginning of each turn; their tools' results come in the middle of one.
BY_STEP = frozenset({"opencode"})
BY_PIECE = frozenset({"gemini-cli"})  # formats that print a message in pieces


@dataclass
class TracePart:
    """One part of a turn. `text`: words, or a tool's input; `ok`: None while a tool has not answered."""

    kind: Literal["assistant", "thought", "user", "system", "tool", "error", "end", "output"]
    text: str = ""
    tool: str | None = None
    output: str | None = None
    exit_code: int | None = None
    ok: bool | None = None
    duration_s: float | None = None

    @property
    def failed(self) -> bool:
        return self.kind == "error" or self.ok is False

    @property
    def chars(self) -> int:
        return len(self.text) + len(self.output or "")


@dataclass
class TraceTurn:
    """One turn, or a block of other output."""

    elapsed_s: float | None  # budget used at its beginning; None if nothing tells
    offset: int | None  # byte of agent.log at which it begins; None for a trajectory's
    format: str = ""
    number: int | None = None  # from 1; None for output and for words before the driver's first answer
    attempt: int = 1
    model: str | None = None
    call_id: str | None = None
    figures: dict[str, float] = field(default_factory=dict)
    is_total: bool = False  # the figures are the session's so far, because the format gives no others
    parts: list[TracePart] = field(default_factory=list)
    answered: bool = False  # a result or words to the driver came: its next answer begins another turn

    @property
    def driven(self) -> bool:
        return bool(self.figures) or any(part.kind in ("assistant", "thought", "tool") for part in self.parts)


# elapsed seconds, byte, attempt, format, events; the format is empty for plain output
Seen = tuple[float | None, int | None, int, str, list[Event]]


def read_turns(
    log: Path, times: Path, trajectories: Iterable[TrajectoryMessage] = (), told: Iterable[TraceEvent] = ()
) -> list[TraceTurn]:
    """Read the turns of a run from agent.log and agent.times, in the order in which they began. `told`: what the recorder
    wrote of the same trace: times and attempts of lines."""
    known = {event.offset: event for event in told if event.source == LOG}
    lines = heapq.merge(_of_log(log, times, known), _of(trajectories), key=lambda seen: seen[0] or 0.0)
    sessions: dict[Any, _Session] = {}
    latest: dict[str, str | None] = {}
    turns: list[TraceTurn] = []
    left = MAX_CHARS
    for elapsed_s, offset, attempt, form, events in lines:
        for event in events:
            if event["kind"] == "session":
                latest[form] = event.get("session")
            key = form, event.get("session") or latest.get(form)
            left -= sessions.setdefault(key, _Session(form, turns)).add(event, elapsed_s, offset, attempt)
        if left < 0:
            where = f"from byte {offset} of {LOG} on" if offset is not None else "of the trajectory"
            note = TracePart("error", f"the trace is too long: the rest {where} is left out")
            turns.append(TraceTurn(elapsed_s, offset, parts=[note]))
            break
    for number, turn in enumerate((turn for turn in turns if turn.driven), 1):
        turn.number = number
    return turns


class _Session:
    def __init__(self, form: str, turns: list[TraceTurn]) -> None:
        self.form, self.turns = form, turns
        self.turn: TraceTurn | None = None
        self.calls: dict[str | None, TracePart] = {}
        self.model: str | None = None
        self.size = 0

    def add(self, event: Event, elapsed_s: float | None, offset: int | None, attempt: int) -> int:
        """Add an event to its turn. Return the number of characters that it adds."""
        kind, role, turn = event["kind"], event.get("role"), self.turn
        self.model = event.get("model") or self.model
        if kind == "session":
            self.calls = {}
            if turn is not None:
                turn.answered = True
            return 0
        is_driver = kind == "tool_call" or role in ("assistant", "thought")
        if turn is None or self._begins(turn, event, is_driver):
            turn = self.turn = TraceTurn(elapsed_s, offset, self.form, attempt=attempt)
            self.turns.append(turn)
            self.size = 0
        if is_driver or kind == "usage":
            turn.answered = turn.answered and turn.driven
            turn.model = turn.model or self.model
        if kind == "usage":
            self._spend(turn, event)
            return 0
        turn.answered = turn.answered or kind in ("tool_result", "end") or role in ("user", "system")
        self.calls = {} if kind == "end" else self.calls
        added = self._part(turn, event)
        self.size += added
        return added

    def _begins(self, turn: TraceTurn, event: Event, is_driver: bool) -> bool:
        if turn.driven and self.size > MAX_TURN_CHARS:
            return bool(event["kind"] != "usage")
        if event["kind"] == "usage" and not event.get("is_total"):
            new = event.get("call_id")
            if turn.figures and not turn.is_total and new is not None and new == turn.call_id:
                turn.answered = False  # the same answer goes on after a result
            return bool(turn.figures) and not turn.is_total and (new is None or new != turn.call_id)
        if event.get("role") in ("user", "system") or not self.form:
            return turn.driven or not self.form
        return is_driver and turn.driven and turn.answered and (self.form not in BY_STEP or not self.calls)

    def _spend(self, turn: TraceTurn, event: Event) -> None:
        names = ("tokens_in", "tokens_out", "tokens_cached", "cost_usd")
        figures = {name: event[name] for name in names if event.get(name) is not None}
        if event.get("is_total"):
            if not turn.figures or turn.is_total:
                turn.figures, turn.is_total = figures, True
            return
        turn.call_id, turn.is_total = event.get("call_id"), False
        turn.figures = {**turn.figures, **{k: max(v, turn.figures.get(k, 0)) for k, v in figures.items()}}

    def _part(self, turn: TraceTurn, event: Event) -> int:
        kind = event["kind"]
        if kind in ("tool_call", "tool_result"):
            return self._tool(turn, event)
        said = event.get("said")
        text = shown(said) if isinstance(said, str) else ""
        if kind == "message":
            last = turn.parts[-1] if turn.parts else None
            if last is not None and last.kind == event["role"] and self.form in BY_PIECE:
                last.text += text
            elif text.strip():
                turn.parts.append(TracePart(event["role"], text))
            return len(text)
        turn.parts.append(TracePart(kind, text, ok=event.get("ok")))
        return len(text)

    def _tool(self, turn: TraceTurn, event: Event) -> int:
        call_id = event.get("call_id")
        part = self.calls.get(call_id)
        if part is None and event["kind"] == "tool_result" and call_id is None:
            part = next((each for each in self.calls.values() if each.ok is None), None)
        if part is None or (event["kind"] == "tool_call" and call_id is None):
            part = TracePart("tool", tool=event.get("tool"))
            turn.parts.append(part)
            self.calls[call_id if call_id is not None else f"#{id(part)}"] = part
        before = part.chars
        part.text = part.text or input_text(event.get("input"))
        if event["kind"] == "tool_result":
            output = event.get("output")
            part.output = shown(output if isinstance(output, str) else parse.text_of(output) or "")
            part.ok, part.exit_code = event.get("ok"), event.get("exit_code")
            part.duration_s = event.get("duration_s")
        return part.chars - before


def _of_log(path: Path, times: Path, told: dict[int, TraceEvent]) -> Iterator[Seen]:
    fd = open_plain(path)
    if fd is None:
        return
    stamps, attempt = OutputTimes(times), 1
    elapsed_s: float | None = None
    begun: float | None = None
    with os.fdopen(fd, "rb"):
        for offset, form, events in _items(fd):
            known = told.get(offset) if form else None
            wall = next((event["wall"] for event in events if "wall" in event), None)
            if known is not None:
                elapsed_s, attempt = known.elapsed_s, known.attempt
            elif wall is not None:  # without the recorder, as in a run of AutoRL-Bench
                begun = wall if begun is None else begun
                elapsed_s = max(0.0, wall - begun)
            stamp = stamps.of(offset)
            elapsed_s = elapsed_s if stamp is None else stamp[0]
            yield elapsed_s, offset, attempt, form, events


def _items(fd: int) -> Iterator[tuple[int, str, list[Event]]]:
    log, end = GrowingFile(), 0
    for offset, value in objects_in(log, fd, READ_S, last=True):
        if (read := read_line(value, None)) is not None:
            yield from _plain(fd, end, offset)
            yield offset, *read
            end = log.offset
    yield from _plain(fd, end, os.fstat(fd).st_size)


def _plain(fd: int, begin: int, end: int) -> Iterator[tuple[int, str, list[Event]]]:
    """Yield blocks of plain output, of long output those at both ends."""
    at = begin
    while at < end:
        if at - begin >= MAX_BLOCKS // 2 * BLOCK_BYTES and end - at > MAX_BLOCKS // 2 * BLOCK_BYTES:
            to = end - MAX_BLOCKS // 2 * BLOCK_BYTES
            yield at, "", [{"kind": "output", "said": f"(not shown: {to - at} bytes of {LOG} from byte {at} on)"}]
            at = begin = to
        data = os.pread(fd, min(BLOCK_BYTES, end - at), at)
        cut = data.rfind(b"\n") + 1 if at + len(data) < end else 0
        data = data[: cut or None]
        if not data:
            return
        if data.strip():
            yield at, "", [{"kind": "output", "said": data.decode("utf-8", "replace")}]
        at += len(data)


def _of(trajectories: Iterable[TrajectoryMessage]) -> Iterator[Seen]:
    for kept in trajectories:
        events = mini.read_message(parse.table(parse.parsed(kept.message)))
        events = parse.with_fields(events, session=f"{kept.source} {kept.session}")
        yield kept.elapsed_s, None, kept.attempt, mini.FORMAT, events


_INVISIBLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb]"
)


def shown(text: str) -> str:
    """Return a text without terminal escapes and secrets; control and direction characters are written as escapes."""
    if len(text) > HEAD_CHARS + TAIL_CHARS:
        head = masked(text[: HEAD_CHARS + MASK_AHEAD_CHARS])[:HEAD_CHARS]
        tail = masked(text[-TAIL_CHARS - MASK_AHEAD_CHARS :])[-TAIL_CHARS:]
        text = f"{head}\n(not shown: {len(text) - HEAD_CHARS - TAIL_CHARS} characters)\n{tail}"
    else:
        text = masked(text)
    if text.isascii() and text.isprintable():
        return text
    text = without_escapes(text)
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return _INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def input_text(given: Any) -> str:
    """Return a tool's input as text: the command first, then the other arguments by name."""
    if not isinstance(given, dict):
        return "" if given is None else shown(given if isinstance(given, str) else _json(given))
    rest = dict(given)
    command = rest.pop(next((key for key in parse.RUNS if key in rest), ""), None)
    lines = [] if command is None else [command if isinstance(command, str) else _json(command)]
    for key, value in rest.items():
        text = value if isinstance(value, str) else _json(value)
        lines.append(f"{key}:\n{text}" if "\n" in text else f"{key}: {text}")
    return shown("\n".join(lines))


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "(nested too deeply)"
