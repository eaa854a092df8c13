"""Supervisors and graders as children of a job's first process, which passes on what it is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType

POLL_S = 0.2


@dataclass
class Stopping:
    """Passes TERM and INT (with `usr2`, that signal too) on to the children, and remembers that they came."""

    usr2: bool = False
    asked: int = 0
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def install(self) -> None:
        """Installs the handlers."""
        for number in (signal.SIGTERM, signal.SIGINT, *([signal.SIGUSR2] if self.usr2 else [])):
            signal.signal(number, self._on_signal)

    def start(self, *arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Starts `python -m autorl_hpc job ...` as a child that ends with this process's TERM."""
        child = subprocess.Popen(
            [sys.executable, "-m", "autorl_hpc", "job", *arguments],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
        )
        self.children.append(child)
        if self.asked:  # the signal came before the child was in the list
            child.send_signal(signal.SIGTERM)
        return child

    def sleep(self, seconds: float) -> None:
        """Sleeps, unless a stop is asked for."""
        ends_at = time.monotonic() + seconds
        while not self.asked and time.monotonic() < ends_at:
            time.sleep(POLL_S)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = number
        for child in self.children:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
