"""Follow what the observer (observer/) wrote inside the agent's Python processes. An agent can write there whatever it likes, so
every line is bounded, checked and masked like any other input of its; the facts prove nothing."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError

from autorl_hpc.files.queue import append_event
from autorl_hpc.files.redact import MASK, command_text, cut, masked
from autorl_hpc.files.safe_open import DIR_FLAGS, open_below
from autorl_hpc.recorder.traces.parse import parsed, wall
from autorl_hpc.recorder.trainings import Points, step_of
from autorl_hpc.recorder.watch import GrowingFile, LineWriter, Moment, open_files, whole_lines
from autorl_hpc.records.base import printable
from autorl_hpc.records.recorded import ObservedFact

OBSERVED = ".observed"  # in the workspace; supervise/workspace.py tells it to the observer
# Files that are followed, one for each process that has something to tell; the observer writes none for the others.
MAX_FILES = 4000
MAX_LISTED = 20_000
PIECE_BYTES = 64 * 2**10  # longest line: 300 settings with long values have 40 KB
LOOK_S = 0.3
MAX_CHARS = 400
MAX_KEYS = 300
MAX_DEPTH = 3
_NAME = re.compile(r"[0-9]{1,10}-[0-9]{1,12}(\.[0-9]{1,9})?\.jsonl")


def cleaned(value: Any, name: str = "", depth: int = 0) -> JsonValue:
    """Return a small value without secrets and control characters. `name`: of the field, which tells that it is a secret."""
    if isinstance(value, dict) and depth < MAX_DEPTH:
        items = itertools.islice(value.items(), MAX_KEYS)
        return {printable(masked(key))[:100]: cleaned(each, key, depth + 1) for key, each in items}
    if isinstance(value, list) and depth < MAX_DEPTH:
        if name == "argv":
            return command_text([str(each) for each in value[:MAX_KEYS]])
        return [cleaned(each, name, depth + 1) for each in value[:MAX_KEYS]]
    if value is None or (isinstance(value, (bool, int, float)) and abs(value) < 2**63):
        return value
    text = value if isinstance(value, str) else "..." if isinstance(value, (dict, list)) else f"{value:.3g}"
    text = text[: 4 * MAX_CHARS]
    if masked(f"{name[:100]}={text}").endswith(f"={MASK}"):
        return MASK
    return cut(printable(masked(text)), MAX_CHARS)


def read_fact(line: bytes, now: Moment, looked_s: float) -> ObservedFact | None:
    """Return the fact of a line; None if it is none. Its time is the process's own, if between the last look and this one."""
    value = parsed(line.decode("utf-8", "replace"))
    if not isinstance(value, dict) or not isinstance(value.get("facts"), dict):
        return None
    at_s, clock = value.get("at_s"), wall(now.at)
    at_s = float(at_s) if isinstance(at_s, (int, float)) and 0 <= at_s < 1e11 else None
    elapsed_s = now.elapsed_s if at_s is None or clock is None else now.within(at_s - clock, looked_s)
    program = cut(printable(masked(str(value.get("program", ""))[: 4 * MAX_CHARS])), MAX_CHARS)
    fields = {"pid": value.get("pid"), "what": value.get("what"), "facts": cleaned(value["facts"])}
    seen = {**now.fields(), "elapsed_s": round(elapsed_s, 3), "program": program, "at_s": at_s}
    try:
        return ObservedFact.model_validate({**seen, **fields})
    except ValidationError:
        return None


class Observed:
    """The watch over the observer's files. `points`: for steps of transformers' trainers, and those logged to TensorBoard."""

    every_s = 2.0

    def __init__(self, workspace: Path, path: Path, events: Path, points: Points, max_files: int = MAX_FILES) -> None:
        self._workspace, self._events, self._points, self._max_files = workspace, events, points, max_files
        # An earlier recorder and earlier attempts read the same files.
        self._before = {(v["pid"], v.get("at_s"), v["what"]) for v in map(json.loads, whole_lines(path))}
        self._lines = LineWriter(path)
        self._files: dict[str, GrowingFile] = {}
        self._looked_s, self._bad, self._said = 0.0, 0, False

    def look(self, now: Moment) -> None:
        self._look(now, LOOK_S)

    def close(self, now: Moment) -> None:
        try:
            self._look(now, 2.0, last=True)
            skipped = self._bad + sum(each.skipped for each in self._files.values())
            if skipped:
                append_event(self._events, "observer_lines_unread", attempt=now.attempt, lines=skipped)
        finally:
            self._lines.close()
            self._points.close()

    def _names(self) -> list[str]:
        try:
            root_fd = os.open(self._workspace, DIR_FLAGS)
            try:
                fd = open_below(root_fd, (OBSERVED,), DIR_FLAGS)
            finally:
                os.close(root_fd)
        except OSError:
            return []  # none yet, or replaced by something else
        try:
            with os.scandir(fd) as entries:
                found = [each.name for each in itertools.islice(entries, MAX_LISTED) if _NAME.fullmatch(each.name)]
        finally:
            os.close(fd)
        new = sorted(name for name in found if name not in self._files)
        free = self._max_files - len(self._files)
        if len(new) > free and not self._said:
            self._said = True
            append_event(self._events, "observer_files_unread", files=len(new) - free, followed=self._max_files)
        self._files |= {name: GrowingFile() for name in new[:free]}
        return [name for name in found if name in self._files]

    def _look(self, now: Moment, limit_s: float, *, last: bool = False) -> None:
        deadline = time.monotonic() + limit_s
        for (_, name), file in open_files(self._workspace, [(OBSERVED, name) for name in self._names()]):
            log, fd = self._files[name], file.fileno()
            while log.behind(fd) > 0 and time.monotonic() < deadline and not self._lines.full:
                before, data = log.offset, log.piece(fd, PIECE_BYTES, last=last)
                self._lines.add(*self._facts(data, now, f"{OBSERVED}/{name}"))
                log.offset += len(data)
                if log.offset == before:
                    break
        self._looked_s = max(self._looked_s, now.elapsed_s)

    def _facts(self, data: bytes, now: Moment, source: str) -> list[ObservedFact]:
        read = [read_fact(line, now, self._looked_s) for line in data.splitlines()]
        self._bad += sum(each is None for each in read)
        new = [each for each in read if each is not None and (each.pid, each.at_s, each.what) not in self._before]
        for fact in new:
            if fact.what == "log" and fact.facts.get("by") and (step := step_of(fact.facts)) is not None:
                self._points.add(step, source, Moment(fact.elapsed_s, now.at, now.attempt))
        return new
