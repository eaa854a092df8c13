"""Which programs the agent ran, from when to when, and how they ended."""

from __future__ import annotations

import time
from pathlib import Path

from autorl_hpc.files.events import append_event
from autorl_hpc.recorder.masking import command_text
from autorl_hpc.recorder.pace import Pace
from autorl_hpc.recorder.table import Changes, Process, ProcessTable
from autorl_hpc.recorder.watch import Lines, Moment
from autorl_hpc.records.recorded import ProcessSeen

LOOK_S = 0.5
SLOWEST_LOOK_S = 10.0
SHARE = 0.0015
BURST_S = 0.04
"""Of a core, and what can be saved up. With hundreds of processes, or many births a second, looks come less often."""

MAX_BYTES = 32 * 2**20
BURST = 20_000
LINES_A_SECOND = 1.0
"""Processes are written as long as they come no faster; a loop in a shell starts hundreds a second."""

LONG_S = 10.0
"""One that lives as long is written all the same, as long as the file has room."""


class Processes:
    """Writes a line when a process began, when it became another program, and when it was gone; see `ProcessSeen`.

    Args:
        table: looked at here; `Usage` takes its figures from it.
        path: where the lines go.
        events: where it is told, at the end, how many processes were not written.
    """

    name = "processes"

    def __init__(self, table: ProcessTable, path: Path, events: Path) -> None:
        self.table = table
        self.every_s = LOOK_S
        self.left_out = 0
        self._lines = Lines(path, MAX_BYTES)
        self._events = events
        self._written: dict[tuple[int, int], float] = {}
        self._waiting: dict[tuple[int, int], Process] = {}
        self._room = float(BURST)
        self._last_look = time.monotonic()
        self._pace = Pace(SHARE, BURST_S, LOOK_S, SLOWEST_LOOK_S)

    def look(self, now: Moment) -> None:
        """Looks once."""
        self._look(now)

    def _look(self, now: Moment, *, last: bool = False) -> None:
        begun = time.monotonic()
        self._room = min(BURST, self._room + (begun - self._last_look) * LINES_A_SECOND)
        self._last_look = begun
        self._pace.begin()
        try:
            self.table.look(last=last)
            self._write(self.table.take_changes(), now)
        finally:
            self.every_s = self._pace.end()

    def close(self, now: Moment) -> None:
        """A last look. What still runs goes out of sight."""
        try:
            self._look(now, last=True)
            left = self.table.still_running()
            self._lines.add(*(self._seen(process, "unseen", now) for process in left if _who(process) in self._written))
        finally:
            self.table.close()
            self._lines.close()
            if missing := self.left_out + self.table.beyond:
                append_event(self._events, "recorder_left_out", watch=self.name, processes=missing)

    def _write(self, changes: Changes, now: Moment) -> None:
        records: list[ProcessSeen] = []
        for process in changes.began:
            self._began(process, now, records)
        for who, process in list(self._waiting.items()):
            if process.age_s >= LONG_S and not process.ended:
                del self._waiting[who]
                self._note(process, now, records)
        for process in changes.became:
            if _who(process) in self._written and self._room >= 1:
                self._room -= 1
                records.append(self._seen(process, "began", now))
        for process in changes.ended:
            if _who(process) in self._written:
                records.append(self._seen(process, "ended", now))
                del self._written[_who(process)]
            else:
                self.left_out += 1
                self._waiting.pop(_who(process), None)
        self._lines.add(*records)

    def _began(self, process: Process, now: Moment, records: list[ProcessSeen]) -> None:
        if self._lines.full:
            return
        if self._room >= 2:
            self._room -= 2
            self._note(process, now, records)
        else:
            self._waiting[_who(process)] = process

    def _note(self, process: Process, now: Moment, records: list[ProcessSeen]) -> None:
        self._written[_who(process)] = max(0.0, now.elapsed_s - process.age_s)
        records.append(self._seen(process, "began", now))

    def _seen(self, process: Process, what: str, now: Moment) -> ProcessSeen:
        argv = process.argv.rstrip(b"\0").decode("utf-8", "backslashreplace").split("\0") if process.argv else []
        return ProcessSeen.model_validate(
            {
                **now.told(),
                "pid": process.pid,
                "parent": process.parent,
                "what": what,
                "command": command_text(argv or [f"[{process.name.decode('utf-8', 'backslashreplace')}]"]),
                "began_s": round(self._written[_who(process)], 2),
                "cpu_s": round(process.cpu_s, 2),
                "exit_code": process.exit_code,
            }
        )


def _who(process: Process) -> tuple[int, int]:
    return process.pid, process.began_ticks
