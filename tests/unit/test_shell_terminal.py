"""The shell of agent `shell`: served in a folder, shown to who attaches, by the real program on real terminals."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

from helpers import wait_for

from autorl_hpc.files.share import share

TERMINAL = share("templates") / "agents" / "shell" / "terminal.py"
LIMIT_S = 60.0


class Attached:
    """One who looks."""

    def __init__(self, workspace: Path) -> None:
        master, slave = pty.openpty()
        self.master, self.seen = master, b""
        argv = [sys.executable, str(TERMINAL), "attach", str(workspace)]
        self.process = subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def sees(self, text: bytes) -> bool:
        deadline = time.monotonic() + LIMIT_S
        while text not in self.seen and time.monotonic() < deadline:
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.master, 65536)
                except OSError:
                    break
        return text in self.seen


def test_a_shell_outlives_who_looks_and_ends_with_its_own_code(tmp_path: Path) -> None:
    (tmp_path / ("deep" * 40)).mkdir()  # longer than a socket's absolute path may be
    workspace = tmp_path / ("deep" * 40)
    with open(tmp_path / "log", "wb") as log:
        served = subprocess.Popen(
            [sys.executable, str(TERMINAL)], cwd=workspace, stdout=log, stdin=subprocess.DEVNULL, stderr=log
        )
    try:
        wait_for((workspace / ".terminal").exists, "the socket")
        one = Attached(workspace)
        one.type(b"MINE=4; tty -s && echo it-is-$((MINE * 10 + 2))\n")
        assert one.sees(b"it-is-42")
        one.type(b"\x1d")
        assert one.process.wait(LIMIT_S) == 0 and served.poll() is None
        other = Attached(workspace)
        assert other.sees(b"it-is-42")  # what was printed before
        other.type(b"echo still-$MINE\n")
        assert other.sees(b"still-4")
        other.type(b"exit 9\n")
        assert served.wait(LIMIT_S) == 9 and other.process.wait(LIMIT_S) == 0
    finally:
        served.kill()
    assert b"it-is-42" in (tmp_path / "log").read_bytes() and not (workspace / ".terminal").exists()
