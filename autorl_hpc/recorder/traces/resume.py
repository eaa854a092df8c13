"""What a recorder before this one has written: where to go on, so that nothing is counted twice."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from autorl_hpc.recorder.traces.documents import Followed


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
    documents: dict[str, Followed] = field(default_factory=dict)


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
    followed = found.documents.setdefault(source, Followed())
    if kind == "session":
        followed.session, followed.messages = event.get("session"), 0
    elif not event.get("is_total"):
        followed.messages = max(followed.messages, offset + 1)
