"""A workspace with an agent's code, and a watch on it whose clock goes when it is told to."""

from __future__ import annotations

import queue
import shutil
import subprocess
from pathlib import Path

import pytest
from codehistory import Pointer, files_at

from autorl_hpc.files.layout import RunDir
from autorl_hpc.recorder.code import Ask, CodeLimits, Revisions
from autorl_hpc.recorder.watch import Moment, RecorderJob
from autorl_hpc.records.recorded import CodeRevision

NOW = Moment(1.5, "2026-01-01T00:00:00.000+00:00", 1)


class World:
    """A workspace, and a watch on it, whose clock goes when it is told to."""

    def __init__(self, tmp: Path) -> None:
        self.now_s = 1000.0
        self.workspace, self.run = tmp / "workspace", RunDir(tmp / "run")
        self.code = self.workspace / "code"
        self.code.mkdir(parents=True)
        self.run.path.mkdir()
        self.asks: queue.SimpleQueue[Ask] = queue.SimpleQueue()
        self.watch = self.fresh()

    def fresh(self, attempt: int = 1, limits: CodeLimits | None = None) -> Revisions:
        """The watch of a recorder that has just been started."""
        job = RecorderJob(
            run_folder=self.run.path,
            workspace=self.workspace,
            keeper_pid=1,
            mark="m",
            attempt=attempt,
            elapsed_s=0.0,
            told_at_s=0.0,
            suspension_s=30.0,
            laid=frozenset({"submit", "instructions.md", "run_meta.json"}),
        )
        read_back = RecorderJob.model_validate_json(job.line())
        assert read_back == job
        return Revisions(read_back, self.asks, limits, lambda: self.now_s)

    def look(self, seconds: float = 0.0) -> None:
        self.now_s += seconds
        self.watch.look(NOW)

    def snapshot(self, submission_id: int = 1) -> str | None:
        """What a submission is told."""
        told: list[str | None] = []
        self.asks.put(Ask(submission_id, told.append))
        self.watch.look(NOW)
        (revision,) = told
        return revision

    def files(self) -> dict[str, bytes | Pointer]:
        """What a commit of this moment holds."""
        revision = self.snapshot()
        assert revision is not None
        return files_at(self.run.code_git, revision)

    def held(self) -> dict[str, bytes | Pointer]:
        """What the last commit holds."""
        return files_at(self.run.code_git, self.lines()[-1].revision)

    def lines(self) -> list[CodeRevision]:
        path = self.run.recorded("revisions")
        text = path.read_text() if path.exists() else ""
        return [CodeRevision.model_validate_json(line) for line in text.splitlines()]

    def fsck(self) -> None:
        if shutil.which("git"):
            command = ["git", "-c", "safe.directory=*", "--git-dir", str(self.run.code_git)]
            done = subprocess.run([*command, "fsck", "--full", "--strict"], capture_output=True, check=True)
            assert not [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith(b"dangling")]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)
