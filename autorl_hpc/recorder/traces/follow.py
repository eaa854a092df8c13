"""Follows what an agent's program tells of itself, in its output and in files, and writes it to logs/trace.jsonl."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime
from itertools import chain
from pathlib import Path

from autorl_hpc.files.layout import RunDir
from autorl_hpc.recorder.traces.documents import Documents, Found
from autorl_hpc.recorder.traces.formats import FORMATS, read_line
from autorl_hpc.recorder.traces.lines import LogLines
from autorl_hpc.recorder.traces.resume import resumed
from autorl_hpc.recorder.traces.times import OutputTimes
from autorl_hpc.recorder.traces.told import Told
from autorl_hpc.recorder.watch import Lines, Moment
from autorl_hpc.records.recorded import TraceEvent

LOG = "agent.log"
LOOK_BYTES = 64 * 1024 * 1024
LOOK_S = 0.3
"""Of one look: other watches wait. With a look every 2 s, plain output of 30 MB/s is kept up with."""

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
        self._lines = Lines(path)
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
                    self._keep(self._event(now, wall, Found(LOG, read[0], line.offset, told), at))
            for found in self._documents.look(last=last):
                self._keep(self._event(now, wall, found, None))
            self._note(now, last=last)
        finally:
            self._flush()
        self._looked_s = max(self._looked_s, now.elapsed_s)
        return self._log.ahead > before

    def _unwritten(self, offset: int, told: list[Told]) -> Iterable[Told]:
        """A recorder before this one may have written the first events of the line at which this one begins."""
        return told[self._drop[1] :] if offset == self._drop[0] else told

    def _event(self, now: Moment, wall: float | None, found: Found, stamp: tuple[float, str] | None) -> TraceEvent:
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
