"""A program on a terminal of its own, typed at and read as a person does."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


class Terminal:
    """One program.

    Attributes:
        seen: what it has printed so far.
    """

    def __init__(
        self, argv: Sequence[str], *, patience_s: float, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self.master, slave = pty.openpty()
        self.seen, self.patience_s = b"", patience_s
        self.process = subprocess.Popen([*argv], env=env, cwd=cwd, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)

    def type(self, text: bytes) -> None:
        """Types it, a line feed being the enter key."""
        os.write(self.master, text)

    def sees(self, text: bytes) -> bool:
        """Whether it is printed, now or before patience ends."""
        deadline = time.monotonic() + self.patience_s
        while text not in self.seen and time.monotonic() < deadline:
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.master, 65536)
                except OSError:
                    break
        return text in self.seen
