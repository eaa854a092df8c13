"""A driver's server ends with all that it has started."""

from __future__ import annotations

import sys
from pathlib import Path

from helpers import alive, wait_for

from autorl_hpc.drivers.serve import Server

KEY = "key-0123456789"


def started(folder: Path, program: str) -> Server:
    return Server([sys.executable, "-c", program], {}, folder / "log", 1, "m", KEY, folder)


def test_it_stops_with_children_in_sessions_of_their_own(tmp_path: Path) -> None:
    """Catches a server's process that left its session, and keeps the GPU."""
    child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(900)'], start_new_session=True)"
    server = started(tmp_path, f"{child}; print(p.pid, flush=True); time.sleep(900)")
    pid = int(wait_for(lambda: (tmp_path / "log").read_text().strip(), "its child"))
    server.stop()
    wait_for(lambda: not alive(pid), "the child's end")
