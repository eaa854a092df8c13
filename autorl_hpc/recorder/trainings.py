"""Follows the training logs of trl, transformers and what logs as they do, wherever the agent writes them.

Read are: the agent's output; log files in the workspace, found by their names on the walk; `trainer_state.json` of checkpoints;
TensorBoard's event files. A step that stands in several of them is written once. wandb's offline files are not read.
"""

from __future__ import annotations

import json
import os
import time
from collections import OrderedDict, deque
from pathlib import Path

from autorl_hpc.files.agent_log import open_plain
from autorl_hpc.files.below import DIR_FLAGS, open_regular
from autorl_hpc.files.events import append_event
from autorl_hpc.recorder.backdating import Backdating
from autorl_hpc.recorder.following import Followed
from autorl_hpc.recorder.masking import cut, printable
from autorl_hpc.recorder.points import Points
from autorl_hpc.recorder.steps import HINTS, Step, step_of, steps_in
from autorl_hpc.recorder.sweep import Parts, Sweep
from autorl_hpc.recorder.tfevents import Damaged, records, scalars
from autorl_hpc.recorder.watch import Moment

LOOK_S = 2.0
SLICE_S = 0.02
"""1 % of a core while logs grow faster than they can be read; else much less."""

CLOSE_S = 2.0
"""For what is left when the agent has ended."""

MAX_STATE_BYTES = 32 * 2**20
"""Of a trainer_state.json: some thirty thousand logged steps of GRPO."""

STATE_SHARE = 0.003
"""Of a core, for those: each checkpoint has all steps before it again."""

MAX_FILES = 10_000
MAX_ACTIVE = 64
"""Logs that are looked at each time. More wait for the next walk."""

IDLE_S = 600.0
GROWING_S = 10.0
STATE = "trainer_state.json"
EVENTS = "events.out.tfevents."
LOG_ENDINGS = (".log", ".out", ".err", ".txt", ".jsonl", ".ndjson")
SKIPPED_AT_TOP = {"data", "models", "submissions", "results", ".git", ".agent"}
SKIPPED = {".git", "site-packages", "node_modules", "__pycache__", ".venv", "venv", "dist-packages", ".cache"}
"""Folders whose files no training writes."""


def is_log(parts: Parts) -> bool:
    """Whether a file of the workspace may be a training's log, by its name and place."""
    name = parts[-1]
    if parts[0] in SKIPPED_AT_TOP or not SKIPPED.isdisjoint(parts):
        return False
    return name == STATE or name.startswith((EVENTS, "nohup", "stdout", "stderr")) or name.endswith(LOG_ENDINGS)


class Trainings:
    """Writes a `TrainingPoint` for each step that a trainer logged.

    Args:
        sweep: finds the logs in its workspace.
        path: where points go; those that stand there already are not written again.
        events: where it is told, at the end, what was not read.
    """

    name = "trainings"
    every_s = LOOK_S

    def __init__(self, agent_log: Path, sweep: Sweep, path: Path, events: Path) -> None:
        self.agent_log = agent_log
        self.sweep = sweep
        self.workspace = sweep.workspace
        self.points = Points(path)
        self._events = events
        self._output = Followed()
        self._met: deque[tuple[Parts, os.stat_result]] = deque(maxlen=MAX_FILES)
        self._logs: dict[Parts, Followed] = {}
        self._active: OrderedDict[Parts, float] = OrderedDict()
        self._states: dict[Parts, tuple[int, int, int]] = {}
        self._changed: OrderedDict[Parts, float] = OrderedDict()
        self._times = Backdating()
        self._woken: set[Parts] = set()
        self._next_state = 0.0
        self._groups: dict[Parts, tuple[int, dict[str, float]]] = {}
        self._too_large: set[Parts] = set()
        sweep.visitors.append(self.found)

    def found(self, parts: Parts, status: os.stat_result) -> None:
        """A file of the workspace, met on the walk. Called in the walk's thread."""
        if status.st_size and is_log(parts):
            self._met.append((parts, status))

    def _take_met(self, deadline: float) -> None:
        while self._met and time.monotonic() < deadline:
            self._sort_in(*self._met.popleft())

    def _sort_in(self, parts: Parts, status: os.stat_result) -> None:
        if parts[-1] == STATE:
            identity = (status.st_ino, status.st_size, status.st_mtime_ns)
            if self._states.get(parts) != identity and len(self._states) < MAX_FILES:
                self._states[parts] = identity
                self._changed[parts] = status.st_mtime
            return
        log = self._logs.get(parts)
        if log is None:
            if len(self._logs) >= MAX_FILES:
                return
            log = self._logs[parts] = Followed()
        if log.is_other(status) and parts not in self._active and self._makes_room():
            self._active[parts] = time.monotonic()
            self._woken.add(parts)

    def _makes_room(self) -> bool:
        """Whether another log can be looked at each time; one that has not grown for a while waits for the next walk instead."""
        if len(self._active) < MAX_ACTIVE:
            return True
        oldest = min(self._active, key=lambda parts: self._active[parts])
        if time.monotonic() - self._active[oldest] < GROWING_S:
            return False
        del self._active[oldest]
        return True

    def look(self, now: Moment) -> None:
        """Reads what is new, as far as SLICE_S reaches."""
        deadline = time.monotonic() + SLICE_S
        self._times.tick(self.sweep.walks, now)
        self._take_met(deadline)
        self._read_all(now, deadline)
        if self._changed and time.monotonic() >= self._next_state:
            begun = time.monotonic()
            self._read_states(now, begun)
            self._next_state = begun + (time.monotonic() - begun) / STATE_SHARE

    def close(self, now: Moment) -> None:
        """Looks for logs a last time and reads the rest, last lines without an end too, as far as CLOSE_S reaches."""
        deadline = time.monotonic() + CLOSE_S
        try:
            self.sweep.show(self.found, time.monotonic() + CLOSE_S / 3)
            self._take_met(deadline)
            self._read_all(now, deadline, rest=True)
            self._read_states(now, deadline)
            for parts in list(self._groups):
                self._end_group(parts, now)
        finally:
            self.points.close()
            skipped = self._output.skipped + sum(log.skipped for log in self._logs.values())
            left = {"bytes": skipped, "states": len(self._too_large), "points": self.points.left_out}
            if any(left.values()):
                append_event(self._events, "recorder_left_out", watch=self.name, **left)

    def _read_all(self, now: Moment, deadline: float, rest: bool = False) -> None:
        fd = open_plain(self.agent_log)
        if fd is not None:
            try:
                self._read_text(fd, self._output, "agent.log", now, deadline, rest)
            finally:
                os.close(fd)
        if not self._active:
            return
        root_fd = os.open(self.workspace, DIR_FLAGS)
        try:
            for parts in list(self._active):
                self._active.move_to_end(parts)  # whoever is cut short waits for its next turn
                self._read_log(root_fd, parts, now, deadline, rest)
                if time.monotonic() >= deadline:
                    return
        finally:
            os.close(root_fd)

    def _read_log(self, root_fd: int, parts: Parts, now: Moment, deadline: float, rest: bool) -> None:
        log, before = self._logs[parts], self._logs[parts].offset
        fd = _opened(root_fd, parts)
        if fd is None:
            del self._active[parts]
            return
        try:
            if parts in self._woken:  # since when is not known by looking: only walks find it
                self._woken.discard(parts)
                now = self._times.moment(os.fstat(fd).st_mtime, now)
            if parts[-1].startswith(EVENTS):
                self._read_events(fd, log, parts, now, deadline)
            else:
                self._read_text(fd, log, _source(parts), now, deadline, rest)
        finally:
            os.close(fd)
        if log.offset != before:
            self._active[parts] = time.monotonic()
        elif time.monotonic() - self._active[parts] > IDLE_S:
            del self._active[parts]
            self._end_group(parts, now)

    def _read_text(self, fd: int, log: Followed, source: str, now: Moment, deadline: float, rest: bool) -> None:
        while True:
            before = log.offset
            piece = log.lines(fd, rest=rest)
            if any(hint in piece for hint in HINTS):
                for step in steps_in(piece.decode("utf-8", "replace")):
                    self.points.add(step, source, now)
            if log.offset == before or time.monotonic() >= deadline:
                return

    def _read_events(self, fd: int, log: Followed, parts: Parts, now: Moment, deadline: float) -> None:
        while piece := log.read(fd, jump=False):
            try:
                found, taken = records(piece, log.size - log.offset)
            except Damaged:
                log.offset = log.size
                return
            for record in found:
                try:
                    self._gather(parts, *scalars(record), now)
                except Damaged:
                    continue
            log.offset += taken
            if not taken or time.monotonic() >= deadline:
                return

    def _gather(self, parts: Parts, step: int, values: dict[str, float], now: Moment) -> None:
        """TensorBoard has one event a figure; those of one step, one after another, are one logged step."""
        for tag, value in values.items():
            split, _, name = tag.partition("/")
            name = name if split == "train" else f"eval_{name}" if split == "eval" else tag
            gathered = self._groups.get(parts)
            if gathered is not None and (gathered[0] != step or name in gathered[1] or _is_eval(name, gathered[1])):
                self._end_group(parts, now)
                gathered = None
            if gathered is None:
                gathered = self._groups[parts] = (step, {"step": float(step)})
            gathered[1][name] = value

    def _end_group(self, parts: Parts, now: Moment) -> None:
        gathered = self._groups.pop(parts, None)
        step = step_of(gathered[1]) if gathered is not None else None
        if step is not None:
            self.points.add(step, _source(parts), now)

    def _read_states(self, now: Moment, deadline: float) -> None:
        """One at least, if there is one."""
        if not self._changed:
            return
        root_fd = os.open(self.workspace, DIR_FLAGS)
        try:
            while self._changed:
                parts, mtime_s = self._changed.popitem(last=False)
                then = self._times.moment(mtime_s, now)
                for step in self._state_steps(root_fd, parts):
                    self.points.add(step, _source(parts), then)
                if time.monotonic() >= deadline:
                    return
        finally:
            os.close(root_fd)

    def _state_steps(self, root_fd: int, parts: Parts) -> list[Step]:
        fd = _opened(root_fd, parts)
        if fd is None:
            return []
        with os.fdopen(fd, "rb") as file:
            data = file.read(MAX_STATE_BYTES + 1)
        if len(data) > MAX_STATE_BYTES:
            self._too_large.add(parts)
            return []
        try:
            state = json.loads(data)
        except (ValueError, RecursionError):
            self._states.pop(parts, None)  # half written, most likely: again on the next walk
            return []
        history = state.get("log_history") if isinstance(state, dict) else None
        entries = history if isinstance(history, list) else []
        return [step for entry in entries if isinstance(entry, dict) and (step := step_of(entry)) is not None]


def _is_eval(name: str, gathered: dict[str, float]) -> bool:
    """Whether a figure of an evaluation comes after those of training at the same step, or the other way round."""
    others = gathered.keys() - {"step", "epoch"}
    return name != "epoch" and any(other.startswith("eval_") is not name.startswith("eval_") for other in others)


def _opened(root_fd: int, parts: Parts) -> int | None:
    try:
        return open_regular(root_fd, parts)
    except OSError:
        return None


def _source(parts: Parts) -> str:
    return cut(printable("/".join(parts)), 300)
