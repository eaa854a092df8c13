"""Progress bars: on a terminal alone, with rate and remaining time, and never two at once."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import suppress

import pytest

SCRIPT = """
import time
from autorl_hpc.files import progress
progress.SHOW_AFTER_S = {after_s}
with progress.bar("outer [b]", 4, in_bytes=False) as advance:
    for _ in range(4):
        time.sleep(0.15)
        advance(1)
        for _ in progress.tracked(range(2), "inner"):
            time.sleep(0.05)
with progress.bar("bytes", 4 << 20) as advance:
    for _ in range(4):
        time.sleep(0.15)
        advance(1 << 20)
"""


@pytest.mark.parametrize(("terminal", "after_s"), [(True, 0.1), (True, 60), (False, 0.0)])
def test_a_bar_is_shown_on_a_terminal_for_what_takes_long(terminal: bool, after_s: float) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-c", SCRIPT.format(after_s=after_s)]
    env = {**os.environ, "COLUMNS": "100", "TERM": "xterm"}
    child = subprocess.Popen(command, stderr=slave if terminal else subprocess.PIPE, env=env)
    os.close(slave)
    said = b""
    with suppress(OSError):  # how a terminal ends
        while part := os.read(master if child.stderr is None else child.stderr.fileno(), 4096):
            said += part
    assert child.wait() == 0
    shown = terminal and after_s < 1
    assert (b"outer [b]" in said) == (b"/s" in said) == (b"0:00:0" in said) == (b"MB" in said) == shown, said
    assert b"inner" not in said and (shown or not said)
