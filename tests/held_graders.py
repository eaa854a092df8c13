"""Real graders that stay where a test wants them: with the answers of their first submission, before anything of it is committed."""

from __future__ import annotations

import subprocess
from pathlib import Path

from helpers import Cluster, wait_for

SCRIPT = """
import os, sys, time
from pathlib import Path
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.grading import attempts, daemon

experiment, room = map(Path, sys.argv[1:])
real = attempts.Attempts.answer

def answer(self, *arguments):
    found = real(self, *arguments)
    attempts.Attempts.answer = real
    (room / str(os.getpid())).touch()
    while not (room / "go").exists():
        time.sleep(0.05)
    return found

attempts.Attempts.answer = answer
sys.exit(daemon.run_grader(ExperimentDir(experiment)))
"""


class HeldGraders:
    """Where they wait."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.room = cluster.root.path / "held"
        self.room.mkdir()

    def start(self, count: int = 1) -> list[subprocess.Popen[bytes]]:
        """So many graders; returns when each of them is there."""
        arguments = ("-c", SCRIPT, str(self.cluster.experiment.path), str(self.room))
        graders = [self.cluster.begin("grader", *arguments) for _ in range(count)]
        for grader in graders:
            path: Path = self.room / str(grader.pid)
            wait_for(path.exists, "a grader with answers")
        return graders

    def let_go(self) -> None:
        """All go on."""
        (self.room / "go").touch()
