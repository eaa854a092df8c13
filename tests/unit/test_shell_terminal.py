"""The shell of agent `shell`: served in a folder, shown to who attaches, by the real program on real terminals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from helpers import wait_for
from terminals import Terminal

from autorl_hpc.files.layout import share

TERMINAL = share("templates") / "agents" / "shell" / "terminal.py"
LIMIT_S = 60.0


def attached(workspace: Path) -> Terminal:
    """One who looks."""
    return Terminal([sys.executable, str(TERMINAL), "attach", str(workspace)], patience_s=LIMIT_S)


def test_a_shell_outlives_who_looks_and_ends_with_its_own_code(tmp_path: Path) -> None:
    (tmp_path / ("deep" * 40)).mkdir()  # longer than a socket's absolute path may be
    workspace = tmp_path / ("deep" * 40)
    with open(tmp_path / "log", "wb") as log:
        served = subprocess.Popen(
            [sys.executable, str(TERMINAL)], cwd=workspace, stdout=log, stdin=subprocess.DEVNULL, stderr=log
        )
    try:
        wait_for((workspace / ".terminal").exists, "the socket")
        one = attached(workspace)
        one.type(b"MINE=4; tty -s && echo it-is-$((MINE * 10 + 2))\n")
        assert one.sees(b"it-is-42")
        one.type(b"\x1d")
        assert one.process.wait(LIMIT_S) == 0 and served.poll() is None
        other = attached(workspace)
        assert other.sees(b"it-is-42")  # what was printed before
        other.type(b"echo still-$MINE\n")
        assert other.sees(b"still-4")
        other.type(b"exit 9\n")
        assert served.wait(LIMIT_S) == 9 and other.process.wait(LIMIT_S) == 0
    finally:
        served.kill()
    assert b"it-is-42" in (tmp_path / "log").read_bytes() and not (workspace / ".terminal").exists()
