"""What the recorder is told when it is started: one JSON line of the supervisor's."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autorl_hpc.files.layout import RunDir


@dataclass(frozen=True)
class Job:
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
    def told(cls, line: bytes) -> Job:
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
