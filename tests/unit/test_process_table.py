"""What a child used is counted once, whenever its parent was read."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from helpers import PATIENCE_S

from autorl_hpc.recorder.process_table import TICKS, ProcessTable

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time\\nwhile time.process_time() < 1.5: pass"])
sys.stdin.readline()
child.wait()
print("waited", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_parent_read_before_its_child_went_does_not_count_it_twice() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdin is not None and parent.stdout is not None
    try:
        table = ProcessTable(os.getpid(), "no-mark")
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and not any(
            p.ended and p.parent == parent.pid for p in table.processes.values()
        ):
            table.look()
            time.sleep(0.05)
        (child,) = (p for p in table.processes.values() if p.parent == parent.pid)
        assert child.ended and child.own >= 1.4 * TICKS and table.processes[parent.pid].children == 0
        before = table.cpu_s
        parent.stdin.write("wait\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "waited\n"
        # As a look finds it that read the parent, then lost the child: what the parent had then is what was before.
        gone = {child.pid: table.processes.pop(child.pid)}
        had = {parent.pid: 0, table.root: table._kept.children}
        table._read_heirs(gone)
        table._read_heirs(gone)
        table._account(gone, had)
        table.look()
        assert before <= table.cpu_s < before + 1.0, "the tests' own process counts, too, and may collect its garbage"
    finally:
        parent.kill()
        parent.wait()
