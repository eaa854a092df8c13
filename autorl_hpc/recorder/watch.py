"""What the parts of the recorder have in common: a moment, a watch that looks again and again, and lines in a file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
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


# How often something may be looked at, by what it costs.

WALL_SHARE = 0.25
"""Of the time, that a look may take by the clock: on a slow file system it takes little CPU, but a server's time."""


class Pace:
    """A share of one core, with some credit for bursts: what is saved while nothing happens may be spent at once.

    Args:
        share: of a core, over time.
        burst_s: CPU seconds that can be saved up.
        least_s, most_s: bounds of a pause.
        at_start: how much of the burst is there at the start.
        cpu: CPU seconds of the thread that looks.
    """

    def __init__(
        self,
        share: float,
        burst_s: float,
        least_s: float,
        most_s: float,
        now: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
        at_start: float = 0.5,
    ) -> None:
        self.share, self.burst_s, self.least_s, self.most_s = share, burst_s, least_s, most_s
        self.credit_s = burst_s * at_start
        self._now, self._cpu = now, cpu
        self._at = self._begun = now()
        self._used = 0.0

    def begin(self) -> None:
        """A look begins."""
        self._begun, self._used = self._now(), self._cpu()
        self.credit_s = min(self.burst_s, self.credit_s + self.share * (self._begun - self._at))
        self._at = self._begun

    def end(self) -> float:
        """A look has ended; seconds to wait for the next one."""
        self.credit_s -= self._cpu() - self._used
        pause_s = max(self.least_s, (self._now() - self._begun) * (1 / WALL_SHARE - 1))
        if self.credit_s < 0:
            pause_s = max(pause_s, -self.credit_s / self.share)
        return min(pause_s, self.most_s)


class Leavings:
    """What all other threads of this process leave of a share of a core, for one that can wait.

    So the sum stays below the share, whoever of the others needs how much, as long as they leave `least`.

    Args:
        whole: of a core, for the whole process.
        least, most: bounds of what is left.
        window_s: over which the others' use is averaged, with exponentially falling weight.
        process_cpu, own_cpu: CPU seconds of the process, and of the thread that asks.
    """

    def __init__(
        self,
        whole: float,
        least: float,
        most: float,
        window_s: float,
        now: Callable[[], float] = time.monotonic,
        process_cpu: Callable[[], float] = time.process_time,
        own_cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self.whole, self.least, self.most, self.window_s = whole, least, most, window_s
        self._now, self._process_cpu, self._own_cpu = now, process_cpu, own_cpu
        self._at, self._others_s = now(), process_cpu() - own_cpu()
        self._rate = whole

    def share(self) -> float:
        """The share of a core that is left now."""
        at, others_s = self._now(), self._process_cpu() - self._own_cpu()
        gap_s = at - self._at
        if gap_s > 0:
            rate = max(0.0, others_s - self._others_s) / gap_s
            self._rate += (rate - self._rate) * min(1.0, gap_s / self.window_s)
            self._at, self._others_s = at, others_s
        return min(self.most, max(self.least, self.whole - self._rate))


class Allowance:
    """`burst` of something at once, then one every `every_s`."""

    def __init__(self, burst: int, every_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self.burst, self.every_s, self._now = burst, every_s, now
        self._left, self._at = float(burst), now()

    def left(self) -> bool:
        """Whether one more is allowed."""
        now = self._now()
        self._left, self._at = min(float(self.burst), self._left + (now - self._at) / self.every_s), now
        return self._left >= 1

    def take(self) -> None:
        """One was taken, allowed or not."""
        self._left = max(0.0, self._left - 1)
