"""What the parts of the recorder have in common: a moment, a watch that looks again and again, and lines in a file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from autorl_hpc.files.layout import RunDir
from autorl_hpc.records.recorded import Seen


@dataclass(frozen=True)
class Moment:
    """Now, as records tell it."""

    elapsed_s: float
    at: str
    attempt: int

    def told(self) -> dict[str, float | str | int]:
        """The fields of `Seen`."""
        return {"elapsed_s": self.elapsed_s, "at": self.at, "attempt": self.attempt}


class Watch(Protocol):
    """One thing that is looked at every few seconds. What it raises is recorded, and it is looked at again later.

    Each watch is made and looked at in a thread of its own: what two of them share must bear that.
    """

    name: str
    every_s: float
    """Seconds between two looks; read after each, so that a watch may change its pace."""

    def look(self, now: Moment) -> None:
        """Looks once. Must not take long: the end of the recorder waits for it, three seconds at most."""
        ...

    def close(self, now: Moment) -> None:
        """The agent has ended: looks a last time and lets go."""
        ...


class LineWriter:
    """Appends records to a file, one JSON object a line; a line is whole or, after a crash, the last one is cut.

    Args:
        max_bytes: beyond it nothing is written any more, and `full` says so: an agent must not fill the disk through us.
    """

    def __init__(self, path: Path, max_bytes: int = 64 * 1024 * 1024) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.full = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._fd).st_size

    def add(self, *records: Seen) -> None:
        """Appends records; OSError is the caller's to survive."""
        data = b"".join(r.model_dump_json(exclude_defaults=True).encode() + b"\n" for r in records)
        if not data or self.full:
            return
        if self._size + len(data) > self.max_bytes:
            self.full = True
            return
        os.write(self._fd, data)
        self._size += len(data)

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._size

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)


# What the recorder is told when it is started: one JSON line of the supervisor's.


@dataclass(frozen=True)
class RecorderJob:
    """One attempt, as its recorder sees it.

    Attributes:
        mark: what the environment of the agent's processes holds, see `supervise.processes`.
        elapsed_s, told_at_s: budget used when the recorder is started, and then the host's monotonic clock.
        suspension_s: a longer gap between two ticks was a suspension, which doesn't count.
        trace_format: what the agent's own trace is written in, as agent.yaml says; None: it doesn't.
        laid: names at the top of the workspace that the suite lays: they are not the agent's.
    """

    run: RunDir
    workspace: Path
    agent_log: Path
    keeper_pid: int
    mark: str
    attempt: int
    elapsed_s: float
    told_at_s: float
    suspension_s: float
    trace_format: str | None = None
    laid: frozenset[str] = frozenset()

    def line(self) -> bytes:
        """As it is told."""
        value: dict[str, Any] = {**asdict(self), "run": str(self.run.path), "laid": sorted(self.laid)}
        return (
            json.dumps({**value, "workspace": str(self.workspace), "agent_log": str(self.agent_log)}).encode() + b"\n"
        )

    @classmethod
    def told(cls, line: bytes) -> RecorderJob:
        """From that line. Raises ValueError, KeyError, TypeError."""
        value = json.loads(line)
        return cls(
            **{
                **value,
                "run": RunDir(Path(value["run"])),
                "workspace": Path(value["workspace"]),
                "agent_log": Path(value["agent_log"]),
                "laid": frozenset(value["laid"]),
            }
        )
