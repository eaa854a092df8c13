"""Accepted checkpoints, shared by the runs of an experiment."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from checkpoints import SINGLE

from autorl_hpc.files import artifacts


def copied_artifact(root: Path, name: str = "new") -> Path:
    """A copy that is ready to be installed."""
    folder = root / f".tmp-{name}"
    folder.mkdir()
    (folder / SINGLE).write_text(name)
    (folder / artifacts.READY_NAME).write_text("{}")
    return folder


def test_an_artifact_goes_with_the_last_run_that_needs_it(tmp_path: Path) -> None:
    artifacts.install(tmp_path, copied_artifact(tmp_path, "first"), "hash", "run-a")
    artifacts.install(tmp_path, copied_artifact(tmp_path, "second"), "hash", "run-b")
    assert os.listdir(tmp_path) == ["hash"] and (tmp_path / "hash" / SINGLE).read_text() == "first"
    artifacts.release(tmp_path, "hash", "run-a")
    assert artifacts.artifact_ready(tmp_path, "hash")
    artifacts.release(tmp_path, "hash", "run-b")
    assert os.listdir(tmp_path) == [] and not artifacts.hold(tmp_path, "hash", "run-c")


def test_installing_and_releasing_at_once_loses_no_artifact(tmp_path: Path) -> None:
    """Whoever was told that it holds an artifact finds it there."""

    def use(run: int) -> int:
        for turn in range(100):
            artifacts.install(tmp_path, copied_artifact(tmp_path, f"{run}-{turn}"), "hash", f"run-{run}")
            assert artifacts.artifact_ready(tmp_path, "hash"), "the artifact that this run holds is gone"
            artifacts.release(tmp_path, "hash", f"run-{run}")
        return 1

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(use, range(4))) == 4
    assert os.listdir(tmp_path) == [], "everybody has let go: nothing is left, under no name"
