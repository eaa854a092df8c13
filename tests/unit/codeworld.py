"""A workspace with an agent's code, and a watch on it whose clock goes when it is told to."""

from __future__ import annotations

import queue
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import needs
import pytest
from codehistory import Pointer, files_at

from autorl_hpc.files.layout import RunDir
from autorl_hpc.recorder import code
from autorl_hpc.recorder.code import Ask, Revisions
from autorl_hpc.recorder.watch import Moment, RecorderJob
from autorl_hpc.records.recorded import CodeRevision

NOW = Moment(1.5, "2026-01-01T00:00:00.000+00:00", 1)

needs_git = needs.needs("git", shutil.which("git") is not None, "git is not installed")


class World:
    """A workspace, and a watch on it, whose clock goes when it is told to."""

    def __init__(self, tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now_s, time=time.time)
        for module in (code, code):
            monkeypatch.setattr(module, "time", clock)
        self.workspace, self.run = tmp / "workspace", RunDir(tmp / "run")
        (self.workspace / "code").mkdir(parents=True)
        self.code = self.workspace / "code"
        self.run.path.mkdir()
        self.asks: queue.SimpleQueue[Ask] = queue.SimpleQueue()
        self.watch = self.fresh()

    def fresh(self, attempt: int = 1) -> Revisions:
        """The watch of a recorder that has just been started."""
        job = RecorderJob(
            run=self.run,
            workspace=self.workspace,
            agent_log=self.run.agent_log,
            keeper_pid=1,
            mark="m",
            attempt=attempt,
            elapsed_s=0.0,
            told_at_s=0.0,
            suspension_s=30.0,
            laid=frozenset({"submit", "instructions.md", "run_meta.json"}),
        )
        return Revisions(job, self.asks)

    def later(self, seconds: float) -> None:
        self.now_s += seconds

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

    def lines(self) -> list[CodeRevision]:
        text = self.run.recorded("revisions").read_text().splitlines()
        return [CodeRevision.model_validate_json(line) for line in text]

    def fsck(self) -> None:
        if shutil.which("git"):
            command = ["git", "-c", "safe.directory=*", "--git-dir", str(self.run.code_git)]
            done = subprocess.run([*command, "fsck", "--full", "--strict"], capture_output=True, check=True)
            assert not [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith(b"dangling")]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)
