"""The end of a scripted training: processes that have done their work are gone, whatever destructors would wait for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TRAINERS = Path(__file__).resolve().parents[2] / "templates" / "agents" / "scripted"

SCRIPT = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import machine

class Group:
    def __del__(self):
        time.sleep(600)  # as gloo's destructor waits

class Accelerator:
    is_main_process, num_processes, calls = int(sys.argv[3]) == 0, int(sys.argv[4]), []
    group = Group() if num_processes > 1 else None

    def wait_for_everyone(self):
        print("waited", end="")

    def end_training(self):
        print(", ended", end="")

machine.finish(Accelerator(), Path(sys.argv[2]))
"""


@pytest.mark.parametrize(("rank", "processes", "said"), [(0, 1, "waited, ended"), (0, 2, "waited"), (1, 2, "waited")])
def test_a_finished_training_is_marked_and_gone(tmp_path: Path, rank: int, processes: int, said: str) -> None:
    argv = [sys.executable, "-c", SCRIPT, str(TRAINERS), str(tmp_path / "sft")]
    done = subprocess.run([*argv, str(rank), str(processes)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
    assert (tmp_path / "sft.done").exists() == (rank == 0)
