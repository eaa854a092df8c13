"""Hold what the recorder's parts share: `Moment`, the protocol `Watch`, `LineWriter` for JSON lines, and `RecorderJob`."""

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
    """The current time, as records hold it."""

    elapsed_s: float
    at: str
    attempt: int

    def told(self) -> dict[str, float | str | int]:
        """Return the fields of `Seen`."""
        return {"elapsed_s": self.elapsed_s, "at": self.at, "attempt": self.attempt}


class Watch(Protocol):
    """Something that is looked at every few seconds. Its exceptions are recorded, and it is looked at again later. Each watch
    is created and used in its own thread, so what two of them share must be thread-safe."""

    name: str
    every_s: float
    """Seconds between two looks; read after each look, so a watch may change it."""

    def look(self, now: Moment) -> None:
        """Look once. It must be fast: the end of the recorder waits for it, three seconds at most."""
        ...

    def close(self, now: Moment) -> None:
        """Look a last time after the agent's end, and release resources."""
        ...


class LineWriter:
    """Appends records to a file, one JSON object per line. After a crash only the last line may be cut.

    Args:
        max_bytes: at this size writing stops and `full` is set, so that an agent can't fill the disk through the recorder.
    """

    def __init__(self, path: Path, max_bytes: int = 64 * 1024 * 1024) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.full = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._fd).st_size

    def add(self, *records: Seen) -> None:
        """Append records. Raises OSError, which the caller must handle."""
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
        """Return the file's size in bytes."""
        return self._size

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


# --- the job: one JSON line that the supervisor sends when it starts the recorder


@dataclass(frozen=True)
class RecorderJob:
    """One attempt as its recorder needs it.

    Attributes:
        mark: text in the environment of the agent's processes.
        elapsed_s, told_at_s: budget used at the recorder's start, and the host's monotonic clock at that time.
        suspension_s: a longer gap between two ticks is a suspension, which doesn't count.
        trace_format: format of the agent's trace from agent.yaml; None if not given.
        laid: names at the top of the workspace that the suite creates, not the agent.
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
        """Return it as a JSON line."""
        value: dict[str, Any] = {**asdict(self), "run": str(self.run.path), "laid": sorted(self.laid)}
        return (
            json.dumps({**value, "workspace": str(self.workspace), "agent_log": str(self.agent_log)}).encode() + b"\n"
        )

    @classmethod
    def told(cls, line: bytes) -> RecorderJob:
        """Parse that line. Raises ValueError, KeyError, TypeError."""
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
