"""A process of the suite's that is started while an agent is ended stays."""

from __future__ import annotations

import subprocess
import sys

STARTED_AMID = """
import os, subprocess, threading, time
from autorl_hpc.files.processes import end_all, start_own

there, found, real = threading.Event(), [], subprocess.Popen

def slow(*args, **how):
    child = real(["sleep", "3600"])
    there.set()
    time.sleep(1.0)  # the other thread looks for whom to end
    return child

starting = threading.Thread(target=lambda: found.append(start_own("a_module", {})))
agent = real(["sleep", "3600"])
subprocess.Popen = slow
starting.start()
there.wait()
left = end_all(os.getpid(), "no-such-mark.")
starting.join()
(own,) = found
print(left, agent.wait(), own.poll())
own.kill()
"""


def test_what_is_started_while_an_agent_is_ended_is_not_ended_with_it() -> None:
    done = subprocess.run([sys.executable, "-c", STARTED_AMID], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout == "set() -9 None\n", done
